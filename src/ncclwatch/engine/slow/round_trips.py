"""What the wire says of a job's connections, beside what it said before: links whose messages take longer to be acknowledged
(C4D's delay matrix, here in time as well).

TCP measures the round trip of each connection, a NIC the completion of each work request.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from ncclwatch.engine.job import Group, Job
from ncclwatch.model.identity import ProcessKey

FlowPlace = tuple[int, int, int, int]
"""Process id of the sender, hash of the communicator, rank in it, and peer."""
Pair = tuple[ProcessKey, ProcessKey]
"""Sender and receiver."""

KEPT = 40
"""Bound: newest measurements of a link; they are made every few seconds."""
FEWEST = 2
"""Measurements of a link before it is judged, before the job was slow and since. Unit: measurements. From: one may be odd."""


@dataclass(slots=True)
class RoundTrips:
    """What a job's connections were measured at. Memory: ``KEPT`` times the links."""

    _delays: dict[Pair, deque[tuple[float, float]]] = field(default_factory=dict)
    """(wall time, delay) of each link, seconds, newest last."""
    _usual: dict[Pair, float] = field(default_factory=dict)
    """What each was before the job was slow, where that has been asked."""
    _taken: dict[str, int] = field(default_factory=dict)

    def take(self, job: Job, measured: Mapping[str, tuple[int, Mapping[FlowPlace, float]]]) -> None:
        """Take what is new of :meth:`NetworkMemory.delays`: by host, when it was measured (ns since the epoch), and µs."""
        fresh = {host: found for host, found in measured.items() if self._taken.get(host) != found[0]}
        if not fresh:
            return
        groups: dict[int, list[Group]] = defaultdict(list)
        for group in job.groups.values():
            groups[group.hash].append(group)
        for host, (time_ns, delays) in fresh.items():
            self._taken[host] = time_ns
            pairs: dict[Pair, float] = {}
            for (pid, comm_hash, rank, peer), delay_us in delays.items():
                for group in groups.get(comm_hash, ()):
                    sender, receiver = group.members.get(rank), group.members.get(peer)
                    if sender is None or receiver is None or (sender[0].info.host, sender[0].info.pid) != (host, pid):
                        continue
                    pair = sender[0].info.key, receiver[0].info.key
                    pairs[pair] = max(pairs.get(pair, 0.0), delay_us / 1e6)
            for pair, delay in pairs.items():
                self._delays.setdefault(pair, deque(maxlen=KEPT)).append((time_ns / 1e9, delay))
        present = {member.info.key for member in job.members}
        self._delays = {pair: seen for pair, seen in self._delays.items() if present.issuperset(pair)}
        self._usual = {pair: usual for pair, usual in self._usual.items() if pair in self._delays}

    def delayed(self, since: float) -> dict[Pair, float]:
        """By how much longer a link's messages take since a moment (wall time, seconds) than before: seconds. O(measurements)."""
        found: dict[Pair, float] = {}
        for pair, seen in self._delays.items():
            past = [delay for time, delay in seen if time < since]
            now = [delay for time, delay in seen if time >= since]
            if len(past) >= FEWEST:
                self._usual[pair] = median(past)
            if len(now) >= FEWEST and pair in self._usual and (longer := median(now) - self._usual[pair]) > 0:
                found[pair] = longer
        return found
