"""What a rule of the hang diagnosis is, and when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from ncclwatch.engine.case import Case
from ncclwatch.engine.edges import StallMark, Wait
from ncclwatch.engine.hypotheses import Hypothesis, Retraction


class Stratum(IntEnum):
    """When a rule runs."""

    STATED = 1
    """What the operating system or NCCL states outright: it needs no patience, and ends the inference."""
    DRAW = 2
    """Waits that follow from calls and counts, of every rank."""
    PATIENCE = 3
    """Whether nothing has moved for long enough to accuse anybody of waiting; if not, that ends the inference."""
    RETRACT = 4
    """Waits that count no longer: those that are not begun."""
    FOLLOW = 5
    """Weaker waits, of ranks at which the waits end: whom such a rank may wait for itself, unseen."""
    EXPLAIN = 6
    """Hypotheses from where the waits end, and from what was called."""
    QUALIFY = 7
    """What other evidence says of the hypothesis that stands: a pattern of calls, a port that is down, a CPU limit."""
    BESIDE = 8
    """What is told beside whatever stands, those of the first strata included."""


Conclusion = Wait | StallMark | Retraction | Hypothesis


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``defeats`` names earlier rules only, so that the relation is acyclic (tested).

    ``derivation``: why it is true (NCCL source with tag, paper section). ``recording``: the archived job, scenario or test it is
    needed for. ``near_miss``: one that looks alike and that it must leave alone.
    """

    id: str
    stratum: Stratum
    apply: Callable[[Case], Iterable[Conclusion]]
    derivation: str
    recording: str
    near_miss: str
    defeats: frozenset[str] = field(default_factory=frozenset)
