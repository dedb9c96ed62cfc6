"""What PyTorch's watchdog writes into a job's log when an operation has timed out: who waits in what, and who has called less.

A rank that times out says so in one line, with the number and the kind of the operation, and from 2.2 on in a second one with
its process group and how far that has come (``ProcessGroupNCCL.cpp``, ``WorkNCCL::checkTimeout``, ``Watchdog::run``). Ranks that
did not time out answer its signal to dump with a line of how far they have come (``getNCCLWatchdogTimeoutErrorMsg``), and with
``TORCH_NCCL_DESYNC_DEBUG`` it reports which ranks have not joined (``TraceUtils.h``, ``retrieveDesyncReport``). Numbers are those
of the group, which all its ranks count alike.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ncclwatch.ingest.flight_recorder_job import DEFAULT_GROUP
from ncclwatch.text import clean, compressed

MARK = re.compile(rb"atchdog|\bwork: |join collective|Timeout at collective|lagging ranks that|CollectiveFingerPrint")
"""Of each of its lines."""
SAID = "PyTorch's watchdog"
MOST_RANKS = 65536
"""Bound: lines of all ranks together that are kept."""
SHOWN = 8
"""Bound: ranks of which it is told what they called."""
NOWHERE = -1
"""Stands for the number of an operation where a rank waits in none that is told."""
_TIMEOUT = re.compile(
    r"\[Rank (\d{1,7})\] Watchdog caught collective operation timeout: Work\w{1,16}\(SeqNum=(\d{1,15}), OpType=(\w{1,40})"
    r"(?:, NumelIn=(\d{1,19}))?.{0,160}?\) ran for (\d{1,15}) milliseconds"
)
_GROUP = r"\[PG (?:ID )?(\w{1,64})(?: PG GUID (\w{1,64}))?(?: ?\(([^)\s]{1,64})\))? Rank (\d{1,7})\]"
_COME = (
    r"ast enqueued (?:\w{1,16} )?work: (-?\d{1,20})(?:, last started (?:\w{1,16} )?work: -?\d{1,20}(?: \(\w{0,40}\))?)?"
    r", last completed (?:\w{1,16} )?work: (-?\d{1,20})"
)
_STATUS = re.compile(_GROUP + r".{0,80}? work(?: sequence id)?: (?P<number>\d{1,15}).{0,40}?l" + _COME)
_ANSWER = re.compile(_GROUP + r" Received a dump signal .{1,200}?\. L" + _COME)
_STUCK = re.compile(_GROUP + r" \w{1,32}'s watchdog got stuck for (\d{1,9}) seconds")
_RANKS = r"\[(\d{1,7}(?:, ?\d{1,7}){0,1023})\]"
_TIMED_OUT = re.compile(r"- \[(\d{1,7})\] Timeout at collective: (\w{1,40}), #(\d{1,15})")
_NOT_JOINED = re.compile(_RANKS + r" finished collective #\d{1,15}, but didn't join collective #(\d{1,15})")
_NEVER_JOINED = re.compile(r"ranks " + _RANKS + r" are the lagging ranks that caused this timeout")
_FINGERPRINT = re.compile(
    r"Rank (\d{1,7}) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(\d{1,15}),? ?)?OpType=(\w{1,40})"
    r"(?:, TensorShape=\[([\d, ]{0,200})\])?"
)
_RANK_OF_JOB = re.compile(r"\[rank(\d{1,7})\]:")


def is_watchdogs(line: str) -> bool:
    """Whether a line is one of the watchdog's that is understood."""
    watchdog = Watchdog()
    if MARK.search(line.encode()):
        watchdog.take(line)
    return bool(watchdog)


class Wait(NamedTuple):
    """One rank in one process group: the number of the operation it waits in (``NOWHERE``: none), and of the newest that it has
    called and ended.
    """

    number: int
    called: int
    ended: int


class Operation(NamedTuple):
    """What a rank waits in, by PyTorch's name of it; ``elements`` of its input, -1 where that is not told."""

    kind: str
    elements: int = -1
    milliseconds: int = 0


UNTOLD = Operation("an operation")


@dataclass(slots=True)
class Group:
    """One process group: its ranks' waits, by rank of the job (of the group, before that stood in the line).

    ``several``: a rank of it is there twice: older releases number the groups of each rank by themselves, so it is more than one.
    """

    label: str
    waits: dict[int, Wait] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    several: bool = False

    @property
    def newest(self) -> int:
        """The newest operation that a rank waits in."""
        return max(wait.number for wait in self.waits.values())


class Watchdog:
    """Takes the lines of all ranks, in any order."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, str], Group] = {}
        self.operations: dict[tuple[int, int], Operation] = {}
        """What a rank waits in, by its number."""
        self.fingerprints: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        """What ranks called, by number and rank, where ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` found that it differs."""
        self.not_joined: dict[int, set[int]] = defaultdict(set)
        """By its report on ranks out of step who has not joined an operation; of number 0, who has joined none."""
        self._stuck: dict[int, int] = {}
        """Seconds for which the watchdog of a rank did not go on itself."""
        self._kept = 0

    def __bool__(self) -> bool:
        """Whether there was any."""
        return self._kept > 0

    def take(self, line: str) -> None:
        """One line; others are passed over."""
        if self._kept >= MOST_RANKS:
            return
        found = _RANK_OF_JOB.search(line)
        rank = int(found[1]) if found else None
        if timeout := _TIMEOUT.search(line):
            operation = Operation(timeout[3], int(timeout[4] or -1), int(timeout[5]))
            self._timed_out(int(timeout[1]) if rank is None else rank, int(timeout[2]), operation)
        elif status := _STATUS.search(line):
            self._has_come(status, rank, int(status["number"]))
        elif answer := _ANSWER.search(line):
            self._has_come(answer, rank, NOWHERE)
        elif stuck := _STUCK.search(line):
            self._kept += 1
            self._stuck.setdefault(int(stuck[4]) if rank is None else rank, int(stuck[5]))
        else:
            self._reported(line)

    def _timed_out(self, rank: int, number: int, operation: Operation) -> None:
        self._kept += 1
        known = self.operations.setdefault((rank, number), operation)
        if known.kind != operation.kind:
            # Of two groups, which count by themselves: which of them is meant is in no line.
            self.operations[rank, number] = UNTOLD

    def _has_come(self, found: re.Match[str], rank: int | None, number: int) -> None:
        self._kept += 1
        name, about, place = found[2] or found[1], found[3] or "", int(found[4])
        label = about if about == DEFAULT_GROUP else f"{name} ({about})" if about else name
        group = self.groups.setdefault((name, about), Group(clean(label, 64)))
        rank = place if rank is None else rank
        group.several |= group.places.setdefault(place, rank) != rank
        # Who answers a signal may time out afterwards.
        if rank not in group.waits or group.waits[rank].number == NOWHERE:
            called, ended = found.groups()[-2:]
            group.waits[rank] = Wait(number, int(called), int(ended))

    def _reported(self, line: str) -> None:
        """A line of the report on ranks out of step, or of calls that differ (``ProcessGroupWrapper.cpp``)."""
        for found in _FINGERPRINT.finditer(line):
            self._kept += 1
            said = f"{found[3]} of shape [{clean(found[4], 64)}]" if found[4] is not None else found[3]
            self.fingerprints[int(found[2] or 0)][int(found[1])].add(said)
        if timeout := _TIMED_OUT.search(line):
            self._timed_out(int(timeout[1]), int(timeout[3]), Operation(timeout[2]))
        elif lagging := _NOT_JOINED.search(line) or _NEVER_JOINED.search(line):
            ranks = [int(part) for part in lagging[1].split(",")]
            self._kept += len(ranks)
            self.not_joined[int(lagging[2]) if lagging.re is _NOT_JOINED else 0].update(ranks)

    # --- words ---------------------------------------------------------------------------------------------------------

    def lines(self) -> Iterator[str]:
        """What they say together, some lines a process group."""
        told: set[tuple[int, int]] = set()
        for group in self.groups.values():
            told |= {(rank, wait.number) for rank, wait in group.waits.items()}
            yield from self._of_group(f"process group {group.label}", group.waits)
        # Of several that a rank has timed out in, the oldest.
        open_ones = sorted(self.operations, reverse=True)
        alone = {rank: Wait(number, -1, -1) for rank, number in open_ones if (rank, number) not in told}
        if alone:
            yield from self._of_group("a process group that is not told", alone)
        for number, ranks in sorted(self.not_joined.items()):
            what = f"collective #{number}" if number else "any collective"
            yield f"{SAID}: by its report on ranks out of step {have(ranks)} not joined {what}"
        for number, called in sorted(self.fingerprints.items()):
            by_rank = "; ".join(f"rank {rank} {' and '.join(sorted(what))}" for rank, what in sorted(called.items())[:SHOWN])
            yield f"PyTorch found that calls differ{f' in collective #{number}' if number else ''}: {by_rank}"
        for rank, seconds in sorted(self._stuck.items()):
            yield f"{SAID}: that of rank {rank} itself stood for {seconds} s: in a call of CUDA or NCCL, or for Python's lock"

    def _of_group(self, group: str, waits: dict[int, Wait]) -> Iterator[str]:
        newest = max(wait.number for wait in waits.values())
        yield from self._waiting(group, waits)
        behind: dict[int, list[int]] = defaultdict(list)
        for rank, wait in waits.items():
            if 0 <= wait.called < newest:
                behind[wait.called].append(rank)
        for called, ranks in sorted(behind.items()):
            yield f"{SAID}: {have(ranks)} called no more than #{called} of {group}, and others wait in #{newest}"
        if newest == NOWHERE:
            come = max(wait.called for wait in waits.values())
            yield f"{SAID}: {have(waits)} called up to #{come} of {group}; none of them says that it waits there"
        # Of a group of which few ranks say anything nobody knows how large it is.
        silent = sorted(set(range(max(waits))) - waits.keys()) if max(waits) < 2 * len(waits) else []
        if silent:
            yield f"{SAID}: no line of {ranks_text(silent)} about {group}: ended before, not in this log, or not of this group"

    def _waiting(self, group: str, waits: dict[int, Wait]) -> Iterator[str]:
        inside: dict[tuple[str, int], list[int]] = defaultdict(list)
        for rank, wait in waits.items():
            if wait.number != NOWHERE:
                inside[self.operations.get((rank, wait.number), UNTOLD).kind, wait.number].append(rank)
        for (kind, number), ranks in sorted(inside.items(), key=lambda item: item[0][1]):
            longest = max(self.operations.get((rank, number), UNTOLD).milliseconds for rank in ranks)
            lasted = f", for {longest / 1000:.0f} s" if longest else ""
            yield f"{SAID}: {ranks_text(ranks)} wait{'' if len(ranks) > 1 else 's'} in {kind} #{number} of {group}{lasted}"


def ranks_text(ranks: Iterable[int]) -> str:
    """``ranks 0-2``."""
    known = sorted(ranks)
    return f"rank{'s' if len(known) > 1 else ''} {compressed(known)}"


def have(ranks: Collection[int]) -> str:
    """``ranks 0-2 have``."""
    return f"{ranks_text(ranks)} {'have' if len(ranks) > 1 else 'has'}"
