"""Rounds of a communicator: for how long each of its ranks was in one operation, from when its GPU began it to when it ended it.

Where the shim reports kernels, a round is a collective whose begin and end every rank has told. Where nothing does, the host's
calls stand for it, as far as a host waits for its GPU: a round is an iteration's last operation, from the call to the first call
of the next iteration. The two are never mixed in one communicator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.slow.cadence import Cadence
from ncclwatch.model.device import DeviceCommunicator, DeviceOperation, KernelState
from ncclwatch.model.identity import ProcessKey

KEPT_ROUNDS = 512
"""Rounds a communicator that are kept while not all ranks have told."""
BARRIER_ELEMENTS = 1
"""An AllReduce of so many elements is a barrier (CCL-D leaves out those of at most 4 bytes)."""

HOST = -1
"""The group of rounds that are made of the hosts' calls: all ranks of the job."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round: wall time (s), and for each rank (index of the member) how long it lasted there (s) and when it began (s)."""

    group: int
    name: str
    time: float
    durations: dict[int, float]
    begins: dict[int, float]


def numbering(job: Job) -> tuple[tuple[int, ProcessKey], ...]:
    """The numbers by which rounds know the processes of a job: where it changes, rounds before and after are not comparable."""
    return tuple((member.index, member.info.key) for member in job.members)


@dataclass(slots=True)
class Rounds:
    """Collects rounds from look to look; each is handed out once."""

    plane: Literal["device", "calls", ""] = ""
    """Where the rounds that were seen come from."""
    _open: dict[int, dict[tuple[str, int], dict[int, tuple[float, float, float]]]] = field(default_factory=dict)
    _done: dict[int, dict[tuple[str, int], None]] = field(default_factory=dict)
    _calls_until: float = 0.0

    def take(self, job: Job, cadences: Sequence[Cadence | None]) -> list[Round]:
        """The rounds that have become complete. ``cadences`` are the members' own, in their order."""
        if any(member.last.device is not None and _times_kernels(member.last.device.communicators) for member in job.members):
            self.plane = "device"
            return [done for group in job.groups.values() for done in self._from_gpus(group)]
        if self.plane == "device":
            return []
        found = self._from_calls(job, cadences)
        self.plane = "calls" if found else self.plane
        return found

    def _from_gpus(self, group: Group) -> Iterator[Round]:
        rounds, done = self._open.setdefault(group.id, {}), self._done.setdefault(group.id, {})
        for member, own in group.members.values():
            offset_s = (member.last.wall_ns - member.last.time_ns) / 1e9
            for operation in _operations(member, own.hash, own.rank, own.address):
                number = operation.sequence if operation.sequence is not None else operation.ordinal
                key = (operation.function, number)
                if key in done or operation.started_ns is None or operation.finished_ns is None:
                    continue
                began, ended = operation.started_ns / 1e9 + offset_s, operation.finished_ns / 1e9 + offset_s
                lasted = operation.duration_ns / 1e9 if operation.duration_ns is not None else ended - began
                rounds.setdefault(key, {})[member.index] = (began, lasted, ended)
        for key in [key for key, times in rounds.items() if len(times) == group.nranks]:
            times = rounds.pop(key)
            done[key] = None
            yield Round(
                group.id,
                key[0],
                max(ended for _, _, ended in times.values()),
                {at: lasted for at, (_, lasted, _) in times.items()},
                {at: began for at, (began, _, _) in times.items()},
            )
        for table in (rounds, done):
            for key in list(table)[: max(0, len(table) - KEPT_ROUNDS)]:
                del table[key]

    def _from_calls(self, job: Job, cadences: Sequence[Cadence | None]) -> list[Round]:
        """The last operation of each iteration, by the host's calls; ranks are matched by when their iterations end."""
        offsets = [(member.last.wall_ns - member.last.time_ns) / 1e9 for member in job.members]
        ends, lasted = [], []
        for cadence, offset in zip(cadences, offsets, strict=True):
            if cadence is None or not cadence.marker or not cadence.profiles:
                return []
            kept = min(len(cadence.profiles), len(cadence.iterations))
            profiles, iterations = list(cadence.profiles)[-kept:], list(cadence.iterations)[-kept:]
            ends.append(np.array([iteration.end + offset for iteration in iterations]))
            lasted.append(np.array([float(profile[-1] - profile[-2]) if len(profile) > 1 else 0.0 for profile in profiles]))
        found = []
        newest = self._calls_until
        for number, end in enumerate(ends[0].tolist()) if ends else ():
            near = [int(np.argmin(np.abs(other - end))) for other in ends]
            length = float(cadences[0].iterations[-1].duration) if cadences[0] is not None else 0.0
            if end <= self._calls_until or any(abs(float(o[at]) - end) > length / 2 for o, at in zip(ends, near, strict=True)):
                continue
            durations = {m.index: float(lasted[i][near[i]]) for i, m in enumerate(job.members)}
            begins = {m.index: float(ends[i][near[i]] - lasted[i][near[i]]) for i, m in enumerate(job.members)}
            found.append(Round(HOST, "end of the iteration", float(ends[0][number]), durations, begins))
            newest = max(newest, end)
        self._calls_until = newest
        return found


def _times_kernels(communicators: Sequence[DeviceCommunicator]) -> bool:
    return any(op.observed and op.finished_ns is not None for c in communicators for op in c.recent)


def _operations(member: Member, comm_hash: int, rank: int, address: int) -> Iterator[DeviceOperation]:
    """The collectives of one communicator that a rank's GPU has ended, barriers left out."""
    if member.last.device is None or member.stopped:
        return
    for communicator in member.last.device.communicators:
        if (communicator.hash, communicator.rank) != (comm_hash, rank) and communicator.inside_address != address:
            continue
        for operation in communicator.recent:
            barrier = operation.function == "AllReduce" and operation.count <= BARRIER_ELEMENTS
            if operation.observed and not operation.point_to_point and not barrier and operation.state is KernelState.FINISHED:
                yield operation
