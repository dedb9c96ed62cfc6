"""Whom the lines of PyTorch's watchdog name: who has called otherwise, and who has not called what others wait in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from ncclwatch.ingest.moment import CONFIDENCE
from ncclwatch.ingest.torch_watchdog import NOWHERE, UNTOLD, Operation, Watchdog, have, ranks_text
from ncclwatch.model.verdict import Culprit, OperationRef, Verdict, VerdictClass

SIZED_ALIKE = frozenset({"ALLREDUCE", "ALLREDUCE_COALESCED", "BROADCAST", "REDUCE"})
"""Fact: operations of which the inputs of all ranks have one size (NCCL, ``src/nccl.h.in``)."""


class Named(NamedTuple):
    """Ranks that hold up others, a reason for each; ``number`` of the operation, 0 where that is not told."""

    verdict_class: VerdictClass
    summary: str
    reasons: Mapping[int, str]
    waiting: set[int]
    kind: str
    number: int


def name_culprits(verdict: Verdict, watchdog: Watchdog) -> Verdict:
    """A verdict that names nobody, with those whom the watchdog's lines name; any other as it is."""
    named = None if verdict.verdict_class.accuses else next(chain(_unlike(watchdog), _behind(watchdog)), None)
    if named is None:
        return verdict
    ranks = ranks_text(named.reasons)
    return replace(
        verdict, verdict_class=named.verdict_class, victims=tuple(sorted(named.waiting)), confidence=CONFIDENCE,
        culprits=tuple(Culprit(rank, None, "", None, None, reason=why, observed=False) for rank, why in named.reasons.items()),
        operation=OperationRef(named.kind, named.number) if named.number else None, rules=(*verdict.rules, "torch-watchdog"),
        summary=f"{ranks} {'hold' if len(named.reasons) > 1 else 'holds'} up the job: {named.summary}",
        next_steps=(f"look in the log of {ranks} what was done there before others timed out",),
    )  # fmt: skip


def _unlike(watchdog: Watchdog) -> Iterator[Named]:
    """What ranks of a group have called differently under one number."""
    for group in watchdog.groups.values():
        for number in sorted({wait.number for wait in group.waits.values()} - {NOWHERE}) if not group.several else ():
            called = {
                rank: _text(watchdog.operations[rank, number]) for rank, wait in sorted(group.waits.items())
                if wait.number == number and watchdog.operations.get((rank, number), UNTOLD) is not UNTOLD
            }  # fmt: skip
            yield from _odd(called, number)
    for number, said in sorted(watchdog.fingerprints.items()):
        # Who has called two operations of one number is in two groups: then it is not known what belongs together.
        if all(len(texts) == 1 for texts in said.values()):
            yield from _odd({rank: next(iter(texts)) for rank, texts in sorted(said.items())}, number)


def _text(operation: Operation) -> str:
    sized = operation.kind in SIZED_ALIKE and operation.elements >= 0
    return f"{operation.kind} of {operation.elements} elements" if sized else operation.kind


def _odd(called: Mapping[int, str], number: int) -> Iterator[Named]:
    """The smaller side of those who have called differently; of equal sides both."""
    sides = Counter(called.values())
    most = max(sides.values(), default=0)
    usual = [what for what, times in sides.items() if times == most]
    odd = {rank: what for rank, what in called.items() if len(usual) > 1 or what not in usual}
    if odd:
        where = f" as #{number}" if number else ""
        reasons = {rank: f"called {what}{where}, unlike its peers" for rank, what in odd.items()}
        rank, what = next(iter(odd.items()))
        other = next(other for other in sides.most_common() if other[0] != what)[0]
        peers = ranks_text(rank for rank, said in called.items() if said == other)
        summary = f"rank {rank} called {what}{where}, {peers} called {other}"
        yield Named(VerdictClass.INCONSISTENT, summary, reasons, called.keys() - odd.keys(), what.partition(" ")[0], number)


def _behind(watchdog: Watchdog) -> Iterator[Named]:
    """Who has nothing open and has not called what others wait in, where these are as many at least: of more nobody knows who is
    wrong.
    """
    waits = [(rank, wait) for group in watchdog.groups.values() for rank, wait in group.waits.items()]
    waits_somewhere = {rank for rank, wait in waits if wait.number != NOWHERE}
    for group in (group for group in watchdog.groups.values() if not group.several):
        late = {rank for rank, wait in group.waits.items() if wait.called <= wait.ended and wait.called < group.newest}
        waiting = {rank for rank, wait in group.waits.items() if wait.number == group.newest}
        yield from _late(watchdog, late - waits_somewhere, waiting, f" of process group {group.label}", group.newest)
    for number, ranks in sorted(watchdog.not_joined.items()):
        waiting = {rank for rank, other in watchdog.operations if other == number or not number}
        yield from _late(watchdog, ranks - waiting, waiting - ranks, "", number)


def _late(watchdog: Watchdog, late: set[int], waiting: set[int], of: str, number: int) -> Iterator[Named]:
    if not 0 < len(late) <= len(waiting):
        return
    kinds = Counter(watchdog.operations[rank, number].kind for rank in waiting if (rank, number) in watchdog.operations)
    kind = kinds.most_common(1)[0][0] if kinds else ""
    what = f"{kind or 'operation'} #{number}{of}" if number else "any collective"
    summary = f"{have(late)} not called {what}, and {ranks_text(waiting)} timed out waiting"
    reasons = dict.fromkeys(sorted(late), f"has not called {what}")
    yield Named(VerdictClass.NOT_ENTERED, summary, reasons, waiting, kind, number)
