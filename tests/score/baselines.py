"""Baselines: **our re-creation** of what others look at, on the same records. They stand for an idea, not for anybody's
product.

Each is given what its original has: counts of launches, call records, times of operations, stacks. Where the original waits for
a person or a watchdog of many minutes, it is granted the same few seconds as everybody.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclwatch.model.events import Flag, Function, Kind
from ncclwatch.model.progress import progressed
from ncclwatch.model.state import ProcessInfo
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from ncclwatch.simulate.scenario import ScoreClass
from ncclwatch.simulate.wire import Events, RecordSet

PATIENCE_S = 5.0
_COLLECTIVES = [Function.ALL_REDUCE, Function.ALL_GATHER, Function.REDUCE_SCATTER]
_ENDS_NS = 4_000_000_000
"""Timings are compared between the first and the last seconds of what is at hand."""
_NONE: frozenset[ScoreClass] = frozenset()


def _infos(records: RecordSet) -> dict[int, ProcessInfo]:
    """Processes by pid; pids are unique over the job in the records of a simulation and of a single-host testbed."""
    return {series[-1].process.pid: series[-1].process for series in records.samples}


def _by_time(rows: Events, column: str) -> Events:
    ordered: Events = rows[np.argsort(rows[column], kind="stable")]
    return ordered


def _accuse(kind: VerdictClass, pids: set[int], infos: dict[int, ProcessInfo], summary: str) -> list[Verdict]:
    named = [infos[p] for p in sorted(pids) if p in infos]
    culprits = tuple(Culprit(i.rank, None, i.host, i.pid, i.local_rank) for i in named)
    return [Verdict(kind, summary, culprits=culprits)]


def _standing(records: RecordSet, seconds: float = PATIENCE_S) -> bool:
    """Whether no process has made progress for ``seconds``."""
    if not records.samples:
        return False
    for series in records.samples:
        newest = series[-1]
        past = [s for s in series if newest.time_ns - s.time_ns >= seconds * 0.99e9]
        if not past or progressed(past[-1], newest):
            return False
    return True


def _by_communicator(records: RecordSet) -> Iterator[tuple[int, dict[int, Events]]]:
    """Collective calls of each communicator, by pid, in order of call."""
    found: dict[int, dict[int, Events]] = defaultdict(dict)
    for events in records.calls.values():
        keep = (
            (events["kind"] == Kind.ENTER) & np.isin(events["function"], _COLLECTIVES) & ((events["flags"] & Flag.COMM_READ) != 0)
        )
        chosen = events[keep]
        for pid in np.unique(chosen["pid"]):
            own = _by_time(chosen[chosen["pid"] == pid], "time_ns")
            for comm in np.unique(own["comm_hash"]):
                found[int(comm)][int(pid)] = own[own["comm_hash"] == comm]
    yield from found.items()


class LaunchCounts:
    """NCCL RAS: counts of launched collectives of each communicator must agree; a member that is gone is missing."""

    name = "launch counts"
    note = "our re-creation of NCCL RAS: launched operations and missing ranks"
    not_yet = _NONE

    def diagnose(self, records: RecordSet, clock_s: float) -> list[Verdict]:
        infos = _infos(records)
        dead = {s[-1].process.pid for s in records.samples if s[-1].run_state in "XZ"}
        if dead:
            return _accuse(VerdictClass.DEAD, dead, infos, "a rank of the communicator is missing")
        counts: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        for series in records.samples:
            if len(series) < 2:
                continue
            before = {c.hash: c for c in series[-2].communicators}
            for c in series[-1].communicators:
                if c.hash in before:
                    counts[c.hash][series[-1].process.pid] = (self._count(before[c.hash]), self._count(c))
        behind: set[int] = set()
        for by_pid in counts.values():
            if any(a != b for a, b in by_pid.values()):
                continue
            least, most = min(b for _, b in by_pid.values()), max(b for _, b in by_pid.values())
            if least < most:
                behind |= {pid for pid, (_, b) in by_pid.items() if b == least}
        return _accuse(VerdictClass.NOT_ENTERED, behind, infos, "launch counts differ") if behind else []

    @staticmethod
    def _count(communicator: object) -> int:
        numbers = getattr(communicator, "sequence_numbers", None)
        return sum(numbers.values()) if numbers else int(getattr(communicator, "op_count", 0) or 0)


class CallRecords:
    """PyTorch Flight Recorder: at a watchdog's timeout, compare the recorded collectives of a group rank by rank."""

    name = "call records"
    note = "our re-creation of Flight Recorder: missing rank or mismatch in call records"
    not_yet = _NONE

    def diagnose(self, records: RecordSet, clock_s: float) -> list[Verdict]:
        if not _standing(records):
            return []
        infos = _infos(records)
        missing: set[int] = set()
        for _, by_pid in _by_communicator(records):
            nranks = int(next(iter(by_pid.values()))["nranks"][0])
            common = min(len(e) for e in by_pid.values())
            for k in range(common):
                asked = {p: (int(e["function"][k]), int(e["count"][k]), int(e["datatype"][k])) for p, e in by_pid.items()}
                usual, votes = Counter(asked.values()).most_common(1)[0]
                odd = {p for p, a in asked.items() if a != usual}
                if odd:
                    culprits = odd if 2 * votes > len(asked) else set(asked)
                    return _accuse(VerdictClass.INCONSISTENT, culprits, infos, "calls of one number differ")
            most = max(len(e) for e in by_pid.values())
            if len(by_pid) == nranks and common < most:
                missing |= {p for p, e in by_pid.items() if len(e) == common}
        return _accuse(VerdictClass.NOT_ENTERED, missing, infos, "ranks have not made the call") if missing else []


@dataclass(slots=True)
class _Operation:
    pids: NDArray[np.int64]
    started: NDArray[np.float64]
    finished: NDArray[np.float64]
    nranks: int
    function: int


def _operations(records: RecordSet) -> dict[tuple[int, int], _Operation]:
    """Collectives by (communicator, number) in seconds of the nodes' own clocks, 0 for not yet."""
    parts = list(records.timings.values())
    if not parts:
        return {}
    rows = np.concatenate(parts)
    first, last = rows["called_ns"].min(), rows["called_ns"].max()
    ends = (rows["called_ns"] < first + np.uint64(_ENDS_NS)) | (rows["called_ns"] + np.uint64(_ENDS_NS) > last)
    rows = rows[np.isin(rows["function"], _COLLECTIVES) & (ends | (rows["finished_ns"] == 0))]
    rows = rows[np.lexsort((rows["rank"], rows["sequence"], rows["comm_hash"]))]
    comms, numbers = rows["comm_hash"], rows["sequence"]
    keys = np.flatnonzero(np.r_[True, (comms[1:] != comms[:-1]) | (numbers[1:] != numbers[:-1])])
    result = {}
    for a, b in zip(keys, [*keys[1:].tolist(), len(rows)], strict=True):
        part = rows[a:b]
        result[int(part["comm_hash"][0]), int(part["sequence"][0])] = _Operation(
            part["pid"].astype(np.int64),
            part["started_ns"] / 1e9,
            part["finished_ns"] / 1e9,
            int(part["nranks"][0]),
            int(part["function"][0]),
        )
    return result


class TimingOnly:
    """C4D: start and end of operations. Not started: non-communication hang; started and not ended: communication hang; and
    both for slow.
    """

    name = "timing only"
    note = "our re-creation of C4D: times of operations, delay of each rank; its matrix of single transfers has no input"
    not_yet = _NONE
    RATIO = 2.0

    def diagnose(self, records: RecordSet, clock_s: float) -> list[Verdict]:
        infos = _infos(records)
        operations = _operations(records)
        if _standing(records):
            return self._hang(operations, infos)
        return self._slow(operations, infos)

    @staticmethod
    def _hang(operations: dict[tuple[int, int], _Operation], infos: dict[int, ProcessInfo]) -> list[Verdict]:
        late: set[int] = set()
        inside: set[int] = set()
        members: dict[int, set[int]] = defaultdict(set)
        for (comm, _), o in operations.items():
            members[comm] |= set(o.pids.tolist())
        for (comm, _), o in operations.items():
            open_ = (o.started > 0) & (o.finished == 0)
            if not open_.any():
                continue
            absent = (members[comm] - set(o.pids.tolist())) | set(o.pids[o.started == 0].tolist())
            if absent:
                late |= absent
            else:
                inside |= set(o.pids[open_].tolist())
        if inside:
            return _accuse(VerdictClass.HARDWARE, inside, infos, "communication hang: all have started, none ends")
        return _accuse(VerdictClass.NOT_ENTERED, late, infos, "non-communication hang: not started") if late else []

    def _slow(self, operations: dict[tuple[int, int], _Operation], infos: dict[int, ProcessInfo]) -> list[Verdict]:
        series: dict[tuple[int, int], list[_Operation]] = defaultdict(list)
        for (comm, _), o in sorted(operations.items(), key=lambda item: item[0]):
            if len(o.pids) == o.nranks and (o.finished > 0).all() and (o.started > 0).all():
                series[comm, o.function].append(o)
        lateness: Counter[int] = Counter()
        slow: set[int] = set()
        for ops in series.values():
            if len(ops) < 12:
                continue
            spent = np.array([float((o.finished - o.started).min()) for o in ops])
            base, now = float(np.median(spent[: len(spent) // 3])), float(np.median(spent[-4:]))
            if now > self.RATIO * base and now - base > 5e-3:
                slow |= set(ops[-1].pids.tolist())
            waits = np.array([float(o.started.max() - np.median(o.started)) for o in ops])
            base, now = float(np.median(waits[: len(waits) // 3])), float(np.median(waits[-4:]))
            if now > self.RATIO * base and now - base > 20e-3:
                lateness[int(ops[-1].pids[int(ops[-1].started.argmax())])] += 1
        if slow:
            return _accuse(VerdictClass.SLOW_COMMUNICATION, slow, infos, "operations of these ranks take longer than they did")
        worst = {p for p, n in lateness.items() if n == max(lateness.values())} if lateness else set()
        return _accuse(VerdictClass.SLOW_COMPUTATION, worst, infos, "these ranks start late") if worst else []


class HeatMap:
    """MegaScale: a map of each rank's compute time; ranks above a fixed threshold over the median are slow."""

    name = "heat map"
    note = "our re-creation of MegaScale: per-rank time between operations against a threshold"
    not_yet = _NONE
    THRESHOLD = 1.3
    WINDOW_S = 3.0

    def diagnose(self, records: RecordSet, clock_s: float) -> list[Verdict]:
        infos = _infos(records)
        spent: dict[int, float] = {}
        for rows in records.timings.values():
            for pid in np.unique(rows["pid"]):
                own = _by_time(rows[(rows["pid"] == pid) & (rows["finished_ns"] > 0)], "started_ns")
                if len(own) < 10:
                    continue
                own = own[own["finished_ns"] > own["finished_ns"].max() - np.uint64(self.WINDOW_S * 1e9)]
                gaps = own["started_ns"][1:].astype(np.int64) - own["finished_ns"][:-1].astype(np.int64)
                spent[int(pid)] = float(np.clip(gaps, 0, None).sum()) / max(1, len(gaps))
        if len(spent) < 2:
            return []
        middle = float(np.median(list(spent.values())))
        hot = {p for p, value in spent.items() if value > self.THRESHOLD * middle}
        return _accuse(VerdictClass.SLOW_COMPUTATION, hot, infos, "above the threshold of the heat map") if hot else []


class LaunchRate:
    """Ingero: a rank's rate of launches against its own past."""

    name = "launch rate"
    note = "our re-creation of Ingero: drop of a rank's launch rate against its own baseline"
    not_yet = _NONE
    WINDOW_S = 2.0

    def diagnose(self, records: RecordSet, clock_s: float) -> list[Verdict]:
        infos = _infos(records)
        newest = max((int(s[-1].time_ns) for s in records.samples), default=0)
        last: dict[int, int] = {}
        dropped: dict[int, float] = {}
        for events in records.calls.values():
            times = events[(events["kind"] == Kind.ENTER) & ((events["flags"] & Flag.COMM_READ) != 0)]
            for pid in np.unique(times["pid"]):
                own = np.sort(times["time_ns"][times["pid"] == pid]).astype(np.int64)
                window = int(self.WINDOW_S * 1e9)
                span = newest - window - int(own[0])
                if span < 2 * window:
                    continue
                usual = np.count_nonzero(own < newest - window) / (span / 1e9)
                now = np.count_nonzero(own >= newest - window) / self.WINDOW_S
                last[int(pid)] = int(own[-1])
                if now < 0.5 * usual:
                    dropped[int(pid)] = now
        if not dropped:
            return []
        if all(v == 0 for v in dropped.values()) and len(dropped) == len(last):
            oldest = min(last[p] for p in dropped)
            first = {p for p in dropped if last[p] - oldest < 1_000_000}
            return _accuse(VerdictClass.NOT_ENTERED, first, infos, "launches stopped here first")
        worst = min(dropped.values())
        return _accuse(VerdictClass.SLOW_COMPUTATION, {p for p, v in dropped.items() if v == worst}, infos, "launch rate dropped")


class StackDifferences:
    """py-spy over all ranks once the job stands: the call each rank is in; those that differ from the most are looked at."""

    name = "stack differences"
    note = "our re-creation of comparing py-spy dumps: the call each rank made last"
    not_yet = _NONE

    def diagnose(self, records: RecordSet, clock_s: float) -> list[Verdict]:
        if not _standing(records):
            return []
        infos = _infos(records)
        stacks: dict[int, tuple[int, int, int]] = {}
        for events in records.calls.values():
            entered = events[events["kind"] == Kind.ENTER]
            for pid in np.unique(entered["pid"]):
                own = entered[entered["pid"] == pid]
                newest = own[int(own["time_ns"].argmax())]
                stacks[int(pid)] = (int(newest["function"]), int(newest["nranks"]), int(newest["count"]))
        for pid in set(infos) - set(stacks):
            stacks[pid] = (0, 0, 0)
        if not stacks:
            return []
        usual, _ = Counter(stacks.values()).most_common(1)[0]
        odd = {p for p, s in stacks.items() if s != usual}
        return _accuse(VerdictClass.NOT_ENTERED, odd, infos, "stacks differ from most") if odd else []


class IterationTime:
    """Greyhound: a change point of the iteration time. It finds who by stopping the job for stress tests, so from records it
    names nobody.
    """

    name = "iteration time"
    note = "our re-creation of Greyhound: change point of the iteration time, no location from records alone"
    not_yet = _NONE
    RATIO = 1.2

    def diagnose(self, records: RecordSet, clock_s: float) -> list[Verdict]:
        rows = next(iter(records.timings.values()), None)
        if rows is None or not len(rows):
            return []
        chosen = (rows["pid"] == rows["pid"].min()) & (rows["finished_ns"] > 0) & np.isin(rows["function"], _COLLECTIVES)
        own = _by_time(rows[chosen], "started_ns")
        kinds = Counter(zip(own["comm_hash"].tolist(), own["function"].tolist(), strict=True))
        if not kinds:
            return []
        comm, function = min(kinds, key=lambda k: (kinds[k], k))  # what comes least often comes once an iteration
        times = own["finished_ns"][(own["comm_hash"] == comm) & (own["function"] == function)].astype(np.int64) / 1e9
        lengths = np.diff(times)
        if len(lengths) < 6:
            return []
        base, now = float(np.median(lengths[: max(3, len(lengths) // 2)])), float(np.mean(lengths[-3:]))
        if now > self.RATIO * base:
            return [Verdict(VerdictClass.SLOW_COMPUTATION, "iteration time changed")]
        return []


def all_baselines() -> list[LaunchCounts | CallRecords | TimingOnly | HeatMap | LaunchRate | StackDifferences | IterationTime]:
    """Every baseline, in the order of the table."""
    return [LaunchCounts(), CallRecords(), TimingOnly(), HeatMap(), LaunchRate(), StackDifferences(), IterationTime()]
