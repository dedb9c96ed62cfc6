"""NCCL kernels that a profiler recorded on the GPUs of a job, as records; and whose GPU comes late to collectives.

All ranks leave a collective at about the same time, so who was in it for a shorter time came later (CCL-D, 4.2.2): that needs
no common clock. Kernels that are not in a trace prove nothing: a trace is a window, and windows of ranks differ. So a trace is
looked at only while all of its ranks are recorded, and never says that anybody hangs.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.functions import FUNCTIONS
from ncclwatch.ingest.base import Ingested
from ncclwatch.ingest.traced import (
    SECOND,
    TracedRank,
    batches,
    call_records,
    communicator,
    look_times,
    once_a_moment,
    without_pids,
)
from ncclwatch.model.device import DeviceCommunicator, DeviceOperation, DeviceSample
from ncclwatch.model.events import Function
from ncclwatch.model.state import Communicator
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass

RECENT = 4096
"""Bound: operations of a communicator that one look holds."""
FEWEST_ROUNDS = 8
"""Collectives of a communicator by which anybody is late; chosen."""
MOSTLY = 0.6
"""Part of them to which its GPU must come last; chosen: of four equals each does so to a quarter."""
LEAST = 0.05
"""Part of the recorded time for which the others must wait for it; chosen."""
MOST_NOTES = 8
BLIND = (
    "a trace holds what its profiler recorded while it ran: kernels that are not in it prove nothing, so no hang is told",
    "neither what proxies and the network do, nor host names and pids",
)


_NAME = re.compile(r"^nccl(?:Symk?)?(?:Dev)?(?:Kernel_?)?(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv|AlltoAll)")
_BY_NAME = {
    "AllReduce": Function.ALL_REDUCE, "AllGather": Function.ALL_GATHER, "ReduceScatter": Function.REDUCE_SCATTER,
    "Broadcast": Function.BROADCAST, "Reduce": Function.REDUCE, "AlltoAll": Function.ALL_TO_ALL,
}  # fmt: skip
SENDS = "SendRecv"
"""What NCCL calls its kernel of messages; PyTorch's all-to-all is many of these in one."""


def function_of(kernel: str) -> Function | None:
    """What a kernel's name says: ``ncclDevKernel_AllReduce_Sum_f32_RING_LL``, ``ncclKernel_…`` before NCCL 2.19,
    ``ncclAllReduceRingLLKernel_…`` before 2.8, ``ncclSymkDevKernel_…`` for symmetric memory. ``None`` for messages, and for
    what is not known.
    """
    match = _NAME.match(kernel)
    return _BY_NAME.get(match[1]) if match is not None else None


def sends(kernel: str) -> bool:
    """Whether a kernel is one of messages."""
    match = _NAME.match(kernel)
    return match is not None and match[1] == SENDS


class Kernel(NamedTuple):
    """One NCCL operation of one rank. ``group``: (name of the group, ranks of the job in it); ``sequence`` is equal on all its
    ranks where it is known; times in ns since the epoch, on the clock of its host; ``launched`` is when the host called it.
    """

    group: tuple[str, tuple[int, ...]]
    function: int
    sequence: int | None
    elements: int
    datatype: int
    peer: int
    launched: int
    begin: int
    end: int


@dataclass(slots=True)
class KernelRank:
    """The operations of one rank, and how many kernels were left out as nothing says which communicator they are of."""

    rank: int
    source: str
    world: int | None
    kernels: list[Kernel] = field(default_factory=list)
    nameless: int = 0


class Late(NamedTuple):
    """A GPU that comes last to most collectives of a communicator. ``share``: of the recorded time the others waited for it
    there.
    """

    rank: int
    share: float
    last: int
    rounds: int
    ranks: tuple[int, ...]
    name: str

    def text(self) -> str:
        """One line."""
        names = f"ranks {', '.join(map(str, self.ranks[:8]))}{' …' if len(self.ranks) > 8 else ''}"
        return (
            f"rank {self.rank}: its GPU came last to {self.last} of {self.rounds} collectives of {self.name} ({names}); "
            f"the others waited in them {self.share:.1%} of the time"
        )


def job_of(ranks: Sequence[KernelRank], problems: Sequence[str], notes: Sequence[str], name: str) -> Ingested:
    """What the kernels of all ranks say of their job."""
    recorded = [one for one in ranks if one.kernels]
    if not recorded:
        return Ingested((), problems, BLIND, notes, job=name)
    for one in recorded:
        one.kernels.sort(key=lambda kernel: (kernel.launched, kernel.begin))
    traced = [_traced(one) for one in recorded]
    begin = max(one.kernels[0].launched for one in recorded)
    end = min(max(kernel.end for kernel in one.kernels) for one in recorded)
    late = latest(recorded)
    told = [*notes, *(one.text() for one in late[:MOST_NOTES])]
    nameless = sum(one.nameless for one in ranks)
    if nameless:
        told.append(f"{nameless} NCCL kernels were left out: the trace does not say of which communicator they are")
    sources = {one.rank: one.source for one in recorded}

    def amend(verdict: Verdict) -> Verdict:
        return without_pids(name_latest(verdict, late, sources))

    if end <= begin:
        told.append("the windows of the ranks' traces do not overlap: their times are not compared")
        end = begin + SECOND
    looks = look_times(begin, end, end, len(traced))
    made = list(batches(traced, looks, "device"))
    return Ingested(made, problems, BLIND, told, job=name, stages=False, amend=once_a_moment(amend))


def _traced(one: KernelRank) -> TracedRank:
    """One rank as the engine's records: calls where the host made them, operations where its GPU was in them."""
    groups = list(dict.fromkeys(kernel.group for kernel in one.kernels))
    held = {
        group: communicator(number + 1 << 20, _number(*group), group[1].index(one.rank), len(group[1]), group[0])
        for number, group in enumerate(groups)
    }
    events = call_records(len(one.kernels))
    counted: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    operations: dict[tuple[str, tuple[int, ...]], list[DeviceOperation]] = defaultdict(list)
    for row, kernel in zip(events, one.kernels, strict=True):
        own = held[kernel.group]
        counted[kernel.group] += 1
        number = kernel.sequence if kernel.sequence is not None else counted[kernel.group]
        row["time_ns"], row["function"], row["op_count"], row["count"] = kernel.launched, kernel.function, number, kernel.elements
        row["comm"], row["comm_hash"], row["rank"], row["nranks"] = own.address, own.hash, own.rank, own.nranks
        row["datatype"], row["redop"], row["peer"] = kernel.datatype, -1, kernel.peer
        operations[kernel.group].append(_operation(kernel, counted[kernel.group]))
    return TracedRank(one.rank, one.source, one.world, tuple(held.values()), events, device=_device(held, operations))


def _operation(kernel: Kernel, ordinal: int) -> DeviceOperation:
    name = FUNCTIONS[kernel.function].name
    paired = kernel.function in (Function.SEND, Function.RECV)
    return DeviceOperation(
        ordinal, name, paired, kernel.sequence, kernel.elements, kernel.peer if paired else None, 1, 1, 1, observed=True,
        launched_ns=kernel.launched, started_ns=kernel.begin, finished_ns=kernel.end, duration_ns=kernel.end - kernel.begin,
    )  # fmt: skip


def _device(
    held: dict[tuple[str, tuple[int, ...]], Communicator], operations: dict[tuple[str, tuple[int, ...]], list[DeviceOperation]]
) -> Callable[[int], DeviceSample]:
    """What had ended by a moment, of each communicator the newest."""
    ends = {group: np.maximum.accumulate([one.finished_ns or 0 for one in own]).tolist() for group, own in operations.items()}

    def at(look: int) -> DeviceSample:
        seen = []
        for group, own in operations.items():
            done = bisect_right(ends[group], look)
            view = held[group]
            paired = sum(one.point_to_point for one in own[:done])
            seen.append(
                DeviceCommunicator(
                    view.hash, view.address, view.rank, view.nranks, False, done, done - paired, paired,
                    recent=tuple(own[max(0, done - RECENT) : done]), name=group[0],
                )
            )  # fmt: skip
        return DeviceSample("trace", 0, "", look, tuple(seen), events=sum(one.operations for one in seen))

    return at


def _number(name: str, ranks: Sequence[int]) -> int:
    """A number for a communicator, equal on all its ranks."""
    digest = hashlib.blake2b(f"{name}/{list(ranks)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1


def latest(ranks: Sequence[KernelRank]) -> list[Late]:
    """Ranks whose GPUs come last to most collectives of one of their communicators, by what that costs the others."""
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, list[Kernel]]] = defaultdict(dict)
    for one in ranks:
        for kernel in one.kernels:
            if kernel.function not in (Function.SEND, Function.RECV):
                by_group[kernel.group].setdefault(one.rank, []).append(kernel)
    span = max((max(k.end for k in one.kernels) - min(k.begin for k in one.kernels) for one in ranks if one.kernels), default=0)
    found: dict[int, Late] = {}
    for (name, members), held in by_group.items():
        rounds = _rounds(held) if len(held) > 1 else None
        if rounds is None or rounds.shape[1] < FEWEST_ROUNDS or not span:
            continue
        # Who was in it shortest came last; the second shortest waited only for that one.
        shortest = np.sort(rounds, axis=0)
        last = np.bincount(np.argmin(rounds, axis=0), minlength=len(rounds))
        waits = np.bincount(np.argmin(rounds, axis=0), shortest[1] - shortest[0], len(rounds))
        worst = int(np.argmax(waits))
        share = float(waits[worst]) / span
        rank = list(held)[worst]
        if last[worst] >= MOSTLY * rounds.shape[1] and share >= LEAST and (rank not in found or share > found[rank].share):
            found[rank] = Late(rank, share, int(last[worst]), rounds.shape[1], members, name or "a group")
    return sorted(found.values(), key=lambda late: -late.share)


def _rounds(held: dict[int, list[Kernel]]) -> NDArray[np.float64] | None:
    """How long each rank was in each collective that all of them have recorded (ns), shape (ranks, collectives).

    By the sequence number where all have one; else by their order from the end, where all have recorded as many.
    """
    if all(kernel.sequence is not None for kernels in held.values() for kernel in kernels):
        tables = [
            {(kernel.sequence, kernel.function): kernel.end - kernel.begin for kernel in kernels} for kernels in held.values()
        ]
        common = sorted(set.intersection(*map(set, tables)))
        return np.array([[table[key] for key in common] for table in tables], np.float64).reshape(len(tables), len(common))
    lengths = {len(kernels) for kernels in held.values()}
    names = {tuple(kernel.function for kernel in kernels) for kernels in held.values()}
    if len(lengths) > 1 or len(names) > 1:
        return None
    return np.array([[kernel.end - kernel.begin for kernel in kernels] for kernels in held.values()], np.float64)


def name_latest(verdict: Verdict, late: Sequence[Late], sources: dict[int, str]) -> Verdict:
    """A verdict of a job that runs, with the rank whose GPU comes late; where the engine names somebody, its own."""
    if verdict.verdict_class.accuses or not late:
        return verdict
    first = late[0]
    culprit = Culprit(first.rank, first.ranks.index(first.rank), sources.get(first.rank, ""), None, None)
    others = max((one.share for one in late[1:] if one.rank not in first.ranks), default=0.0)
    return replace(
        verdict, verdict_class=VerdictClass.SLOW_COMPUTATION, culprits=(culprit,),
        summary=f"rank {first.rank} holds the job up: its GPU comes late to collectives (estimated from a trace's kernels)",
        victims=tuple(rank for rank in first.ranks if rank != first.rank), evidence=(*verdict.evidence, *_lines(late)),
        confidence=round(min(0.8, 1 - FEWEST_ROUNDS / (2 * first.rounds), first.share / (first.share + others)), 2),
        rules=(*verdict.rules, "trace-latest"),
    )  # fmt: skip


def _lines(late: Sequence[Late]) -> Iterator[str]:
    yield from (one.text() for one in late[:3])
