"""Looks added up: how much of the time each rank and link holds the job up, and what each rank does with its time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.snapshot import Activity, CpuTimes, LinkPlace, Look, Part
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import CpuLimit

Shares = NDArray[np.float64]

OWN = (Part.GPU, Part.HOST, Part.KERNEL)
"""Parts that are a rank's own work."""

INFERRED = 0.25
"""What a look counts at which the kernel of a rank does not show. Unit: looks. From: cross-validation by job on 69 recordings:
with 1 an onlooker in shared memory is named beside the culprit in two of them, with 0.25 in none, and no culprit is lost.
"""

LinkKey = tuple[ProcessKey | None, ProcessKey | None, int, int, int]
"""(sender, receiver, group, source, destination): the processes tell a link, where they are known."""


@dataclass(slots=True)
class Profile:
    """Shares of the looks (0 to 1), by process in the order of ``processes``; arrays of shape (processes,).

    ``hold[part]`` is the share of all ranks' time that is spent waiting for that part of a rank; ``looks_held`` counts the looks
    in which it held up at least one other. ``busy`` is the share in which a rank computed or its host had called nothing,
    ``waits`` that in which it waited for another.
    """

    processes: list[ProcessKey]
    looks: int = 0
    hold: dict[Part, Shares] = field(default_factory=dict)
    looks_held: dict[Part, Shares] = field(default_factory=dict)
    links: dict[LinkKey, float] = field(default_factory=dict)
    link_looks: Counter[LinkKey] = field(default_factory=Counter)
    places: dict[LinkKey, LinkPlace] = field(default_factory=dict)
    operations: dict[object, Counter[tuple[int, str]]] = field(default_factory=lambda: defaultdict(Counter))
    """What was waited in, by process or link: (group, operation) → looks"""
    passes: dict[object, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """In which pass a process was while it held others up, where that is known: pass → looks"""
    busy: Shares = field(default_factory=lambda: np.zeros(0))
    waits: Shares = field(default_factory=lambda: np.zeros(0))
    seen: Shares = field(default_factory=lambda: np.zeros(0))
    """Looks that tell what a rank does, ``INFERRED`` of one where that is only inferred."""
    cpu: Shares = field(default_factory=lambda: np.zeros((2, 0)))
    """Threads that were runnable and had no CPU, and that ran, on average: shape (2, processes); nan where that is not known."""

    held_back: Shares = field(default_factory=lambda: np.zeros(0))
    """The part of the periods of its CPU limit in which each rank was held back; nan where that is not known."""
    limits: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Numbers the control groups that hold ranks back (−1: none)."""

    @property
    def cpu_wait(self) -> Shares:
        """Threads of each rank that wait for a CPU, on average."""
        wait: Shares = self.cpu[0]
        return wait

    @property
    def cpu_use(self) -> Shares:
        """CPUs that each rank uses, on average."""
        use: Shares = self.cpu[1]
        return use

    def of(self, processes: Sequence[ProcessKey], values: Shares, missing: float = np.nan) -> Shares:
        """Values of this profile's processes for others, in their order; ``missing`` for those it does not know."""
        known = dict(zip(self.processes, values.tolist(), strict=True))
        return np.array([known.get(process, missing) for process in processes], np.float64)

    def own(self) -> Shares:
        """Share of the job's time spent waiting for each rank's own work."""
        return sum((self.hold[part] for part in OWN), np.zeros(len(self.processes)))

    def own_looks(self) -> Shares:
        """Looks in which each rank's own work held others up."""
        return sum((self.looks_held[part] for part in OWN), np.zeros(len(self.processes)))


def link_key(place: LinkPlace) -> LinkKey:
    """A link is the pair of its processes where both are known, whichever communicator it is used by; else its ranks in one."""
    if place.sender is not None and place.receiver is not None:
        return (place.sender, place.receiver, 0, 0, 0)
    return (place.sender, place.receiver, place.group, place.source, place.destination)


def add_up(looks: Sequence[Look], processes: Sequence[ProcessKey]) -> Profile:
    """Profile of some looks. O(holds)."""
    index = {key: at for at, key in enumerate(processes)}
    size = len(index)
    held_back, limits = _cpu_limits(looks, index)
    profile = Profile(
        list(processes), len(looks), {part: np.zeros(size) for part in Part}, {part: np.zeros(size) for part in Part},
        cpu=_cpu_times(looks, index), held_back=held_back, limits=limits, passes=_passes(looks),
    )  # fmt: skip
    busy, waits, seen = np.zeros(size), np.zeros(size), np.zeros(size)
    for look in looks:
        _add_holds(profile, look, index)
        for process, activity in look.activities.items():
            if process in index and activity is not Activity.UNKNOWN:
                at, weight = index[process], INFERRED if process in look.inferred else 1.0
                seen[at] += weight
                busy[at] += weight * (activity in (Activity.COMPUTES, Activity.CALLS_NOTHING))
                waits[at] += weight * (activity is Activity.WAITS)
    number = max(1, len(looks))
    profile.hold = {part: shares / number for part, shares in profile.hold.items()}
    profile.links = {key: value / number for key, value in profile.links.items()}
    told = np.where(seen > 0, seen, 1.0)
    profile.busy, profile.waits, profile.seen = busy / told, waits / told, told
    return profile


def _add_holds(profile: Profile, look: Look, index: Mapping[ProcessKey, int]) -> None:
    """Add whom others wait for at one look; it held up at least one of them alone where its weight is that of a rank."""
    least = 0.9 / max(1, look.ranks)
    held: set[tuple[Part, int]] = set()
    linked: set[LinkKey] = set()
    for hold in look.holds:
        if hold.link is not None:
            key = link_key(hold.link)
            profile.links[key] = profile.links.get(key, 0.0) + hold.weight
            profile.places.setdefault(key, hold.link)
            profile.operations[key][hold.group, hold.operation] += 1
            if hold.weight >= least:
                linked.add(key)
        elif hold.process is not None and hold.process in index:
            at = index[hold.process]
            profile.hold[hold.part][at] += hold.weight
            profile.operations[hold.process][hold.group, hold.operation] += 1
            if hold.weight >= least:
                held.add((hold.part, at))
    profile.link_looks.update(linked)
    for part, at in held:
        profile.looks_held[part][at] += 1


def _passes(looks: Sequence[Look]) -> dict[object, Counter[str]]:
    found: dict[object, Counter[str]] = defaultdict(Counter)
    for look in looks:
        for process, text in look.passes.items():
            found[process][text] += 1
    return found


def _cpu_times(looks: Sequence[Look], index: dict[ProcessKey, int]) -> Shares:
    """Seconds waited and run a second: shape (2, processes)."""
    last: dict[int, CpuTimes] = {}
    sums = np.zeros((3, len(index)))
    for look in looks:
        for process, times in look.cpu_times.items():
            at = index.get(process)
            if at is None:
                continue
            before = last.get(at)
            # The wait is summed over threads that are alive: where one has ended it says nothing of this stretch.
            if before is not None and times.at > before.at and times.waited >= before.waited:
                sums[:, at] += (times.at - before.at, times.waited - before.waited, times.ran - before.ran)
            last[at] = times
    rates: Shares = sums[1:] / np.where(sums[0] > 0, sums[0], np.nan)
    return rates


def _cpu_limits(looks: Sequence[Look], index: dict[ProcessKey, int]) -> tuple[Shares, NDArray[np.int64]]:
    """The part of its periods in which a CPU limit held each process back (0 where nothing limits it), and the control group
    with that limit as a number: both of shape (processes,).
    """
    last: dict[ProcessKey, CpuLimit] = {}
    rises: dict[ProcessKey, tuple[int, int]] = {}
    for look in looks:
        for process, times in look.cpu_times.items():
            if process not in index or times.limit is None:
                continue
            before = last.get(process)
            rise = times.limit.since(before) if before is not None else None
            if rise is not None:
                periods, throttled = rises.get(process, (0, 0))
                rises[process] = (periods + rise[0], throttled + rise[1])
            last[process] = times.limit
    held, groups = np.full(len(index), np.nan), np.full(len(index), -1, np.int64)
    for process, (periods, throttled) in rises.items():
        held[index[process]] = min(1.0, throttled / max(1, periods))
    numbers: dict[tuple[str, int], int] = {}
    for process, limit in last.items():
        if limit.periods:
            groups[index[process]] = numbers.setdefault((process.boot_id, limit.group), len(numbers))
    return held, groups
