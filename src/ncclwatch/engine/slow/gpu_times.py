"""Who comes to collectives later than the others, by the GPUs' own times, where the shim times their kernels.

All ranks leave a collective at about the same time, so who was in it for a shorter time came later (CCL-D 4.2.2): that compares
durations, and needs no clock. How well clocks of different hosts could be compared is told beside it: where one rank always comes
last, its lateness and a wrong clock look alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.slow.clocks import ClockModel, estimate
from ncclwatch.engine.slow.iteration_graph import LEAST_S
from ncclwatch.model.device import DeviceCommunicator, DeviceOperation, KernelState
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Communicator

KEPT_ROUNDS = 512
"""Bound: rounds of a communicator that are remembered until all ranks have told, and rounds of a job that are kept (memory)."""
NEWEST = 20_000
"""Bound: times of ranks in the newest rounds that are compared (time)."""
LEAST_ROUNDS = 3
"""Unit: rounds. From: the median, which says nothing of fewer: one of two may be an outlier."""
BARRIER_ELEMENTS = 1
"""Fact: CCL-D, section 4.2.1: an AllReduce of less than 4 bytes is a barrier; of how many elements it is says the call."""


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
    """Collects rounds from sample to sample: collectives whose begin and end all ranks have told. Each is handed out once."""

    _told: dict[int, dict[tuple[str, int], dict[int, tuple[float, float, float]] | None]] = field(default_factory=dict)
    """By group and (function, number) begin, duration and end (wall time) by rank; ``None`` of what was handed out."""

    def take(self, job: Job) -> list[Round]:
        """The rounds that have become complete."""
        return [done for group in job.groups.values() for done in self._of_group(group)]

    def _of_group(self, group: Group) -> Iterator[Round]:
        told = self._told.setdefault(group.id, {})
        for member, own in group.members.values():
            offset_s = (member.last.wall_ns - member.last.time_ns) / 1e9
            for operation in _collectives(member, own):
                number = operation.sequence if operation.sequence is not None else operation.ordinal
                times = told.setdefault((operation.function, number), {})
                if times is None or operation.started_ns is None or operation.finished_ns is None:
                    continue
                began, ended = operation.started_ns / 1e9 + offset_s, operation.finished_ns / 1e9 + offset_s
                lasted = operation.duration_ns / 1e9 if operation.duration_ns is not None else ended - began
                times[member.index] = began, lasted, ended
        for key, times in told.items():
            if times is not None and len(times) == group.nranks:
                told[key] = None
                durations = {at: lasted for at, (_, lasted, _) in times.items()}
                begins = {at: began for at, (began, _, _) in times.items()}
                yield Round(group.id, key[0], max(ended for _, _, ended in times.values()), durations, begins)
        for key in list(told)[: max(0, len(told) - KEPT_ROUNDS)]:
            del told[key]


def told_of(member: Member, own: Communicator) -> Iterator[DeviceCommunicator]:
    """What the shim tells of one communicator of a process."""
    for told in member.last.device.communicators if member.last.device is not None else ():
        if (told.hash, told.rank) == (own.hash, own.rank) or told.inside_address == own.address:
            yield told


def _collectives(member: Member, own: Communicator) -> Iterator[DeviceOperation]:
    """The collectives of one communicator that a rank's GPU has ended, barriers left out."""
    for told in told_of(member, own) if not member.stopped else ():
        for operation in told.recent:
            barrier = operation.function == "AllReduce" and operation.count <= BARRIER_ELEMENTS
            if operation.observed and not operation.point_to_point and not barrier and operation.state is KernelState.FINISHED:
                yield operation


@dataclass(frozen=True, slots=True)
class Start:
    """How much later than the others one rank's GPU comes to collectives: median over ``rounds``, seconds."""

    late_s: float
    rounds: int

    def text(self) -> str:
        """One line of evidence, without the rank's name."""
        late = f"{self.late_s * 1e3:.0f} ms later than the others"
        return f"its GPU comes to collectives {late}, in the middle of {self.rounds} (shim)"


@dataclass(slots=True)
class GpuTimes:
    """The newest rounds of one job as its GPUs timed them."""

    rounds: Rounds = field(default_factory=Rounds)
    kept: deque[Round] = field(default_factory=lambda: deque(maxlen=KEPT_ROUNDS))

    def take(self, job: Job) -> None:
        """Take what the newest samples tell; nothing where no process has the shim."""
        if any(member.last.device is not None for member in job.members):
            self.kept.extend(self.rounds.take(job))

    def _newest(self) -> list[Round]:
        largest = max((len(done.durations) for done in self.kept), default=1)
        return list(self.kept)[-max(LEAST_ROUNDS, NEWEST // largest) :]

    def starts(self, since: float) -> dict[int, Start]:
        """By index of the member: whose GPU has come late to collectives since a moment (wall time)."""
        late: dict[int, list[float]] = {}
        for done in self._newest():
            if done.time >= since and len(done.durations) > 1:
                usual = float(np.median(list(done.durations.values())))
                for at, lasted in done.durations.items():
                    late.setdefault(at, []).append(usual - lasted)
        found = {at: Start(float(np.median(times)), len(times)) for at, times in late.items() if len(times) >= LEAST_ROUNDS}
        return {at: start for at, start in found.items() if start.late_s >= LEAST_S}

    def clocks(self, job: Job) -> ClockModel:
        """The hosts' clocks, numbered as hosts come up in the job; of one host nothing."""
        hosts: dict[str, int] = {}
        node = {member.index: hosts.setdefault(member.info.host, len(hosts)) for member in job.members}
        rows = [
            (node[at], number, begin, begin + done.durations[at])
            for number, done in enumerate(self._newest())
            for at, begin in done.begins.items()
            if at in node
        ]
        if len(hosts) < 2 or not rows:
            return ClockModel()
        nodes, numbers, begin, end = np.array(rows, np.float64).T
        return estimate(nodes.astype(np.int64), numbers.astype(np.int64), begin, end)

    def clocks_text(self, job: Job) -> str:
        """How well clocks of hosts can be compared, in words; empty where there is one host, or nothing to tell it by."""
        known = list(self.clocks(job).clocks.values())
        if len(known) < 2:
            return ""
        apart, error = max(abs(clock.offset_s) for clock in known), max(clock.error_s for clock in known)
        if not np.isfinite(error):
            return "clocks of hosts cannot be compared: they have no operation in common"
        known_to = f"known to ±{error * 1e3:.1f} ms by operations in common"
        return f"clocks of {len(known)} hosts differ by up to {apart * 1e3:.1f} ms, {known_to}"
