"""What the wire says of a job's connections, beside what it said before: links whose messages take longer to be acknowledged
(C4D's delay matrix, here in time as well), and processes that leave unread what has come.

TCP measures the round trip of each connection, a NIC the completion of each work request. Bytes that lie unread say that the data
has come and that its receiver is behind: its proxy sleeps, its host lacks CPUs, or its GPU takes nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TypeVar

from ncclwatch.engine.job import Group, Job
from ncclwatch.engine.network import NetworkMemory
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Direction

FlowPlace = tuple[int, int, int, int]
"""Process id of the sender, hash of the communicator, rank in it, and peer."""
Pair = tuple[ProcessKey, ProcessKey]
"""Sender and receiver."""
Key = TypeVar("Key", Pair, ProcessKey)

KEPT = 40
"""Bound: newest measurements of a link or process; they are made every few seconds."""
FEWEST = 2
"""Measurements of a link before it is judged, before the job was slow and since. Unit: measurements. From: one may be odd."""


@dataclass(slots=True)
class RoundTrips:
    """What a job's connections were measured at. Memory: ``KEPT`` times the links."""

    _delays: dict[Pair, deque[tuple[float, float]]] = field(default_factory=dict)
    """(wall time, delay) of each link, seconds, newest last."""
    _unread: dict[ProcessKey, deque[tuple[float, float]]] = field(default_factory=dict)
    """(wall time, part of its connections that held bytes it had not read) of each process."""
    _usual: dict[Pair | ProcessKey, float] = field(default_factory=dict)
    """What each was before the job was slow, where that has been asked."""
    _taken: dict[str, int] = field(default_factory=dict)

    def take(
        self, job: Job, measured: Mapping[str, tuple[int, Mapping[FlowPlace, float]]], network: NetworkMemory | None = None
    ) -> None:
        """Take what is new of :meth:`NetworkMemory.delays`: by host, when it was measured (ns since the epoch), and µs; and of
        bytes that lie unread.
        """
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
            self._take_unread(job, host, time_ns, network)
        present = {member.info.key for member in job.members}
        self._delays = {pair: seen for pair, seen in self._delays.items() if present.issuperset(pair)}
        self._unread = {process: seen for process, seen in self._unread.items() if process in present}
        self._usual = {key: usual for key, usual in self._usual.items() if key in self._delays or key in self._unread}

    def _take_unread(self, job: Job, host: str, time_ns: int, network: NetworkMemory | None) -> None:
        """Which part of the connections over which each process of a host receives holds bytes that it has not read."""
        known = network.hosts.get(host) if network is not None else None
        unread: dict[int, dict[tuple[int, int], bool]] = defaultdict(dict)
        for way, flow, facts in known.known_sockets() if known is not None else ():
            if flow.direction is Direction.RECV:
                peer = way.comm_hash, way.peer
                unread[flow.pid][peer] = unread[flow.pid].get(peer, False) or facts.receive_queue > 0
        for member in job.members:
            if member.info.host == host and (peers := unread.get(member.info.pid)):
                seen = self._unread.setdefault(member.info.key, deque(maxlen=KEPT))
                seen.append((time_ns / 1e9, sum(peers.values()) / len(peers)))

    def delayed(self, since: float) -> dict[Pair, float]:
        """By how much longer a link's messages take since a moment (wall time, seconds) than before: seconds. O(measurements)."""
        return self._grown(self._delays, since, median)

    def unread(self, since: float) -> dict[ProcessKey, float]:
        """By how much larger a part of a process's connections holds unread bytes since a moment than before. O(measurements)."""
        return self._grown(self._unread, since, fmean)

    def _grown(
        self, series: Mapping[Key, Sequence[tuple[float, float]]], since: float, middle: Callable[[Sequence[float]], float]
    ) -> dict[Key, float]:
        found: dict[Key, float] = {}
        for key, seen in series.items():
            past = [value for time, value in seen if time < since]
            now = [value for time, value in seen if time >= since]
            if len(past) >= FEWEST:
                self._usual[key] = middle(past)
            if len(now) >= FEWEST and key in self._usual and (longer := middle(now) - self._usual[key]) > 0:
                found[key] = longer
        return found
