"""How a verdict came about, in words: facts, what rules concluded and took back, what was weighed and lost, what was missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from ncclwatch.model.verdict import Step, StepKind, Verdict
from ncclwatch.text import Style, clean

NO_TRAIL = "no rule of the hang diagnosis led to it"
NO_TRAIL_SLOW = "a job that goes on is judged by its iterations, not by the rules of hangs"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the way to a verdict: a heading and the lines below it, not cleaned yet; ``because``: why its rule is true."""

    heading: str
    lines: tuple[str, ...] = ()
    because: str = ""


def parts(verdict: Verdict) -> list[Part]:
    """The way to a verdict, in order. Facts that stand among its evidence already are not told again."""
    if not verdict.trail:
        return [Part(NO_TRAIL_SLOW if verdict.verdict_class.slow else NO_TRAIL)]
    found = []
    for (kind, rule), steps in groupby(verdict.trail, _group):
        part = _part(verdict, kind, rule, list(steps))
        if part is not None:
            found.append(part)
    return found


def _group(step: Step) -> tuple[StepKind, str]:
    """Steps of one part: what was weighed and lost is one part, whatever rules it was of."""
    return step.kind, step.rule if step.kind in (StepKind.DRAWN, StepKind.RETRACTED, StepKind.STANDS) else ""


def _part(verdict: Verdict, kind: StepKind, rule: str, steps: list[Step]) -> Part | None:
    lines = tuple(step.text for step in steps if step.text)
    if kind is StepKind.FACT:
        told = any(line in verdict.evidence for line in lines)
        # Where the evidence stands above, so does what "… more" counts.
        more = tuple(line for line in lines if line not in verdict.evidence and not (told and line.startswith("…")))
        return Part("seen: the evidence above" + (", and" if more else "") if told else "seen", more)
    if kind is StepKind.DRAWN:
        return Part(f"concluded by rule {rule}", lines, derivation(rule))
    if kind is StepKind.RETRACTED:
        return Part(f"taken back by rule {rule}: a wait that has not started", lines, derivation(rule))
    if kind is StepKind.LOST:
        return Part("weighed, and lost", tuple(f"{step.text}  [rule {step.rule}, against {step.against}]" for step in steps))
    if kind is StepKind.STANDS:
        return Part(f"stands by rule {rule}" if lines else f"made from what rule {rule} says", lines, derivation(rule))
    more = tuple(line for line in lines if line not in verdict.unobserved)
    return Part("not seen, and might tell otherwise", more) if more else None


@cache
def derivation(rule: str) -> str:
    """Why a rule is true, as the table of rules says; empty for one that it does not have."""
    # The table comes with the engine, which whoever shows recorded JSON alone does not need.
    from ncclwatch.engine.rules import RULES

    return next((known.derivation for known in RULES if known.id == rule), "")


def why_lines(verdict: Verdict, style: Style) -> Iterator[str]:
    """The parts as lines below a verdict."""
    yield f"  {style.bold('why')}"
    for part in parts(verdict):
        yield f"    {clean(part.heading, 200)}"
        if part.because:
            yield f"      {style.dim(f'because: {clean(part.because, 300)}')}"
        for line in part.lines:
            yield f"      - {clean(line, 500)}"
