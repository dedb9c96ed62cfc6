"""The rules of the hang diagnosis: one ordered table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from ncclwatch.engine.edges import StallMark, Wait
from ncclwatch.engine.evidence.base import FactKind
from ncclwatch.engine.hypotheses import Hypothesis, Retraction

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case


class Stratum(IntEnum):
    """When a rule runs. RETRACT and FOLLOW take turns until neither changes the graph; retractions go first."""

    STATED = 1
    """What the operating system or NCCL states outright: it needs no patience, and what is stated ends the inference."""
    DRAW = 2
    """Waits that follow from calls and counts, of every rank."""
    PATIENCE = 3
    """Whether nothing has moved for long enough to accuse anybody of waiting."""
    RETRACT = 4
    """Waits that count no longer: those that are not begun."""
    FOLLOW = 5
    """Weaker waits, of ranks at which the waits end: whom such a rank may wait for itself, unseen."""
    EXPLAIN = 6
    """Hypotheses from where the waits end, and from what was called."""
    QUALIFY = 7
    """What other evidence says of the hypothesis that stands: a habit, a port that is down, a CPU limit."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. Hypotheses are weighed in the order of the table: one stands until a rule that ``defeats`` its rule concludes
    another. ``defeats`` names earlier rules only, so that the relation is acyclic (tested).

    ``derivation``: why it is true (NCCL source with tag, paper section). ``recording``: the archived job it is needed for.
    ``near_miss``: one that looks alike and that it must leave alone.
    """

    id: str
    stratum: Stratum
    needs: frozenset[FactKind]
    apply: Callable[[Case], Iterable[Wait | StallMark | Retraction | Hypothesis]]
    defeats: frozenset[str] = frozenset()
    derivation: str = ""
    recording: str = ""
    near_miss: str = ""
