"""How a verdict came about, as records that every surface can show: facts, rules, what was weighed and lost, what was missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

from ncclwatch.engine.case import Case
from ncclwatch.engine.evidence.base import Fact
from ncclwatch.engine.hypotheses import Hypothesis
from ncclwatch.engine.verdict import REASONS
from ncclwatch.model.verdict import Step, StepKind

SHOWN = 6
"""Bound: facts of one kind by one rule that are shown; of more only the number is told."""
NAMED = 8
"""Bound: ranks of a hypothesis that are named."""


def trail_of(case: Case, found: Hypothesis) -> tuple[Step, ...]:
    """The trail of the hypothesis that stands."""
    trail = case.trail
    drawn: dict[str, list[Fact]] = defaultdict(list)
    for rule, fact in trail.drawn:
        drawn[rule].append(fact)
    retracted: dict[str, list[Fact]] = defaultdict(list)
    for retraction in trail.retracted:
        retracted[retraction.rule].append(retraction.fact)
    steps: list[Step] = [*_facts(StepKind.FACT, "", [*found.because, *found.supports, *found.beside])]
    for rule, facts in drawn.items():
        steps += _facts(StepKind.DRAWN, rule, facts)
    for rule, facts in retracted.items():
        steps += _facts(StepKind.RETRACTED, rule, facts)
    steps += [Step(StepKind.LOST, lost.hypothesis.rule, _text(lost.hypothesis), lost.against) for lost in trail.lost]
    steps += [Step(StepKind.STANDS, rule, "") for rule in found.follows if rule != found.rule]
    steps.append(Step(StepKind.STANDS, found.rule, _text(found)))
    steps += _facts(StepKind.MISSING, "", found.missing)
    return tuple(steps)


def _facts(kind: StepKind, rule: str, facts: Iterable[Fact]) -> Iterator[Step]:
    known = list(facts)
    yield from (Step(kind, rule, fact.text) for fact in islice(known, SHOWN))
    if len(known) > SHOWN:
        yield Step(kind, rule, f"… {len(known) - SHOWN} more")


def _text(found: Hypothesis) -> str:
    if not found.suspects:
        return f"{found.verdict_class}: nobody is named ({found.cause})"
    ranks = [_name(suspect.place.rank, suspect.place.comm_rank) for suspect in found.suspects]
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    first = found.suspects[0]
    reason = REASONS[first.cause].format(detail=first.detail)
    return f"{found.verdict_class}: {', '.join(ranks[:NAMED])}{more}: {reason} (confidence {found.confidence:.0%})"


def _name(rank: int | None, comm_rank: int | None) -> str:
    return f"rank {rank}" if rank is not None else f"communicator rank {comm_rank}"
