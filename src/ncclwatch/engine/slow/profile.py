"""Looks added up: how much of the time each rank and link holds the job up, and what each rank does with its time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.snapshot import COLUMNS, Activity, LinkPlace, Look, Part
from ncclwatch.model.identity import ProcessKey

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
    in which it held up at least one other. ``busy``: it computed or its host had called nothing, ``waits``: for another, of
    ``seen`` looks that tell what it does (``INFERRED`` of one where that is only inferred). ``cpu_wait``: threads that were
    runnable and had no CPU, ``cpu_use``: CPUs used, both on average; ``held_back``: the part of the periods of its CPU limit in
    which it was held back (nan: not known); ``limits`` numbers the control groups that hold ranks back (−1: none).
    """

    processes: list[ProcessKey]
    looks: int = 0
    hold: dict[Part, Shares] = field(default_factory=dict)
    looks_held: dict[Part, Shares] = field(default_factory=dict)
    links: dict[LinkKey, float] = field(default_factory=dict)
    link_looks: Counter[LinkKey] = field(default_factory=Counter)
    places: dict[LinkKey, LinkPlace] = field(default_factory=dict)
    operations: dict[object, Counter[tuple[int, str]]] = field(default_factory=lambda: defaultdict(Counter))
    """What was waited in, by process or link: (group, operation) → looks; and, where known, in which pass a process was then."""
    passes: dict[object, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    busy: Shares = field(default_factory=lambda: np.zeros(0))
    waits: Shares = field(default_factory=lambda: np.zeros(0))
    seen: Shares = field(default_factory=lambda: np.zeros(0))
    cpu_wait: Shares = field(default_factory=lambda: np.zeros(0))
    cpu_use: Shares = field(default_factory=lambda: np.zeros(0))
    held_back: Shares = field(default_factory=lambda: np.zeros(0))
    limits: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def own(self) -> tuple[Shares, Shares]:
        """Of each rank's own work: share of the job's time spent waiting for it, and looks in which it held others up."""
        share, looks = (sum((held[part] for part in OWN), np.zeros(len(self.processes))) for held in (self.hold, self.looks_held))
        return share, looks


def link_key(place: LinkPlace) -> LinkKey:
    """A link is the pair of its processes where both are known, whichever communicator it is used by; else its ranks in one."""
    if place.sender is not None and place.receiver is not None:
        return (place.sender, place.receiver, 0, 0, 0)
    return (place.sender, place.receiver, place.group, place.source, place.destination)


def add_up(looks: Sequence[Look], processes: Sequence[ProcessKey]) -> Profile:
    """Profile of some looks. O(holds + looks x processes), in columns."""
    index = {key: at for at, key in enumerate(processes)}
    known, number = _stacked(looks, index), max(1, len(looks))
    hold, looks_held = ({part: np.zeros(len(index)) for part in Part} for _ in range(2))
    profile = Profile(list(processes), len(looks), hold, looks_held)
    for look in looks:
        _add_holds(profile, look, index)
    profile.hold = {part: shares / number for part, shares in profile.hold.items()}
    profile.links = {key: value / number for key, value in profile.links.items()}
    activity = known["activity"]
    weight = np.where(activity == Activity.UNKNOWN, 0.0, np.where(known["inferred"] > 0, INFERRED, 1.0))
    seen = weight.sum(axis=0)
    profile.seen = np.where(seen > 0, seen, 1.0)
    works = np.isin(activity, (Activity.COMPUTES, Activity.CALLS_NOTHING))
    profile.busy, profile.waits = ((weight * does).sum(axis=0) / profile.seen for does in (works, activity == Activity.WAITS))
    profile.cpu_wait, profile.cpu_use = _cpu_times(known)
    profile.held_back, profile.limits = _cpu_limits(known, processes)
    return profile


def _stacked(looks: Sequence[Look], index: Mapping[ProcessKey, int]) -> dict[str, NDArray[np.float64]]:
    """What the looks know of each process: for each of ``COLUMNS`` an array of shape (looks, processes)."""
    found = np.full((len(COLUMNS), len(looks), len(index)), np.nan)
    found[COLUMNS.index("activity")] = Activity.UNKNOWN
    everybody = last = tuple(index)
    rows = np.arange(len(index))
    for number, look in enumerate(looks):
        keys, known = look.columns
        if keys != last:
            rows, last = np.array([index.get(key, -1) for key in keys], np.int64), keys
        if keys == everybody:
            found[:, number] = known
        else:
            found[:, number, rows[rows >= 0]] = known[:, rows >= 0]
    return dict(zip(COLUMNS, found, strict=True))


def _add_holds(profile: Profile, look: Look, index: Mapping[ProcessKey, int]) -> None:
    """Add whom others wait for at one look; it held up at least one of them alone where its weight is that of a rank."""
    least = 0.9 / max(1, look.ranks)
    held: set[tuple[Part, int]] = set()
    for hold in look.holds:
        if hold.link is not None:
            key = link_key(hold.link)
            profile.links[key] = profile.links.get(key, 0.0) + hold.weight
            profile.places.setdefault(key, hold.link)
            profile.operations[key][hold.group, hold.operation] += 1
        elif hold.process is not None and hold.process in index:
            at = index[hold.process]
            profile.hold[hold.part][at] += hold.weight
            profile.operations[hold.process][hold.group, hold.operation] += 1
            if hold.weight * hold.among >= least:
                held.add((hold.part, at))
    for process, text in look.passes.items():
        profile.passes[process][text] += 1
    profile.link_looks.update({link_key(hold.link) for hold in look.holds if hold.link is not None and hold.weight >= least})
    for part, at in held:
        profile.looks_held[part][at] += 1


def _rises(known: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rises of counters at each look since they were last known, and what they were then; NaN: none. Shape (looks, processes)."""
    missing = np.isnan(known)
    if missing.any() and not missing.all():
        places = np.where(missing, 0, np.arange(1, len(known) + 1)[:, None])
        newest = np.maximum.accumulate(places, axis=0)
        known = np.vstack([np.full((1, known.shape[1]), np.nan), known])[newest, np.arange(known.shape[1])]
    past = np.vstack([np.full((1, known.shape[1]), np.nan), known[:-1]])
    return np.where(missing, np.nan, known - past), past


def _cpu_times(known: Mapping[str, NDArray[np.float64]]) -> Shares:
    """Seconds waited and run a second: shape (2, processes)."""
    passed, waited, ran = (_rises(known[name])[0] for name in ("at", "waited", "ran"))
    # The wait is summed over threads that are alive: where one has ended it says nothing of this stretch.
    counts = (passed > 0) & (waited >= 0)
    total, *sums = (np.where(counts, rise, 0.0).sum(axis=0) for rise in (passed, waited, ran))
    rates: Shares = np.stack(sums) / np.where(total > 0, total, np.nan)
    return rates


def _cpu_limits(known: Mapping[str, NDArray[np.float64]], processes: Sequence[ProcessKey]) -> tuple[Shares, NDArray[np.int64]]:
    """The part of its periods in which a CPU limit held each process back (0: no limit), and the number of that control group."""
    held, groups = np.full(len(processes), np.nan), np.full(len(processes), -1, np.int64)
    if not len(known["periods"]):
        return held, groups
    (periods, before), (throttled, _) = (_rises(known[name]) for name in ("periods", "throttled"))
    # A process that was put into a group only in between has no past of its own there.
    counts = (periods >= 0) & (throttled >= 0) & ~((known["periods"] > 0) & (before == 0))
    told = counts.any(axis=0)
    total, back = (np.where(counts, rise, 0.0).sum(axis=0) for rise in (periods, throttled))
    held[told] = np.minimum(1.0, back / np.maximum(total, 1.0))[told]
    numbers: dict[tuple[str, int], int] = {}
    newest = np.argmax(~np.isnan(known["periods"][::-1]), axis=0)
    limits, in_group = (known[name][::-1][newest, np.arange(len(processes))] for name in ("periods", "group"))
    for at in np.flatnonzero(limits > 0).tolist():
        groups[at] = numbers.setdefault((processes[at].boot_id, int(in_group[at])), len(numbers))
    return held, groups
