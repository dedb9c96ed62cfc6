"""What PyTorch's watchdog writes into a job's log when an operation has timed out: who waits in what, and who has called less.

A rank that times out says so in one line, with the number and the kind of the operation, and from 2.2 on in a second one with
its process group and how far that has come (``ProcessGroupNCCL.cpp``, ``WorkNCCL::checkTimeout``, ``Watchdog::run``). Numbers
are those of the group, which all its ranks count alike. Nobody is accused by them: who says nothing may have been killed first.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from ncclwatch.text import clean, compressed

MARK = b"atchdog"
"""Of each of its lines."""
SAID = "PyTorch's watchdog"
MOST_RANKS = 65536
"""Bound: ranks of all groups together."""
_TIMEOUT = re.compile(
    r"\[Rank (\d{1,7})\] Watchdog caught collective operation timeout: Work\w{1,16}\(SeqNum=(\d{1,15}), OpType=(\w{1,40})"
    r".{0,160}?\) ran for (\d{1,15}) milliseconds"
)
_STATUS = re.compile(
    r"\[PG (?:ID )?(\w{1,64})(?: PG GUID (\w{1,64}))?(?: ?\(([^)\s]{1,64})\))? Rank (\d{1,7})\]"
    r".{0,80}? work(?: sequence id)?: (\d{1,15}).{0,40}?"
    r"last enqueued (?:NCCL )?work: (-?\d{1,15}), last completed (?:NCCL )?work: (-?\d{1,15})"
)
_RANK_OF_JOB = re.compile(r"\[rank(\d{1,7})\]:")


def is_watchdogs(line: str) -> bool:
    """Whether a line is one of the watchdog's that is understood."""
    return "atchdog" in line and (_TIMEOUT.search(line) or _STATUS.search(line)) is not None


class Wait(NamedTuple):
    """One rank in one process group: the number of the operation it waits in, and of the newest that it has called and ended."""

    number: int
    called: int
    ended: int


class Watchdog:
    """Takes the lines of all ranks, in any order."""

    def __init__(self) -> None:
        self._waits: dict[str, dict[int, Wait]] = defaultdict(dict)
        """By group and rank of the job (of the group, before that stood in the line)."""
        self._operations: dict[tuple[int, int], tuple[str, int]] = {}
        """Kind and milliseconds of what a rank waits in, by its number."""

    def __bool__(self) -> bool:
        """Whether there was any."""
        return bool(self._operations or self._waits)

    def take(self, line: str) -> None:
        """One line; others are passed over."""
        found = _RANK_OF_JOB.search(line)
        rank = int(found[1]) if found else -1
        if len(self._operations) >= MOST_RANKS:
            return
        if timeout := _TIMEOUT.search(line):
            rank = int(timeout[1]) if rank < 0 else rank
            self._operations.setdefault((rank, int(timeout[2])), (timeout[3], int(timeout[4])))
        elif status := _STATUS.search(line):
            group = clean(status[3] or status[2] or status[1], 64)
            wait = Wait(int(status[5]), int(status[6]), int(status[7]))
            self._waits[group].setdefault(int(status[4]) if rank < 0 else rank, wait)

    def lines(self) -> Iterator[str]:
        """What they say together, some lines a process group."""
        told: set[tuple[int, int]] = set()
        for group, waits in self._waits.items():
            told |= {(rank, wait.number) for rank, wait in waits.items()}
            yield from self._of_group(f"process group {group}", waits)
        alone = {rank: Wait(number, -1, -1) for rank, number in self._operations if (rank, number) not in told}
        if alone:
            yield from self._of_group("a process group that is not told", alone)

    def _of_group(self, group: str, waits: dict[int, Wait]) -> Iterator[str]:
        inside: dict[tuple[str, int], list[int]] = defaultdict(list)
        for rank, wait in waits.items():
            inside[self._operations.get((rank, wait.number), ("an operation", 0))[0], wait.number].append(rank)
        for (kind, number), ranks in sorted(inside.items(), key=lambda item: item[0][1]):
            longest = max(self._operations.get((rank, number), ("", 0))[1] for rank in ranks)
            lasted = f", for {longest / 1000:.0f} s" if longest else ""
            yield f"{SAID}: {_named(ranks)} in {kind} #{number} of {group}{lasted}"
        newest = max(wait.number for wait in waits.values())
        for rank, wait in sorted(waits.items()):
            if 0 <= wait.called < newest:
                yield f"{SAID}: rank {rank} has called no more than #{wait.called} of {group}, and others wait in #{newest}"
        # Of a group of which few ranks say anything nobody knows how large it is.
        silent = sorted(set(range(max(waits))) - waits.keys()) if max(waits) < 2 * len(waits) else []
        if silent:
            yield f"{SAID}: no line of {_ranks(silent)} about {group}: ended before, not in this log, or not of this group"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {compressed(sorted(ranks))}"


def _named(ranks: list[int]) -> str:
    return f"{_ranks(ranks)} wait{'' if len(ranks) > 1 else 's'}"
