"""The rules of the hang diagnosis: one ordered table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from ncclwatch.engine.evidence.base import Fact, FactKind
from ncclwatch.engine.hypotheses import Hypothesis, Retraction

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case


class Stratum(IntEnum):
    """When a rule runs: each stratum to its fixpoint before the next."""

    DRAW = 1
    """Facts that follow from facts: waits that no single source sees."""
    RETRACT = 2
    """Facts that count no longer: waits that are not begun."""
    EXPLAIN = 3
    """Hypotheses from where the waits end."""
    QUALIFY = 4
    """What else is known of those hypotheses: a port that is down, a CPU limit."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``defeats`` names the rules whose hypotheses lose against this one's; the relation is acyclic (tested).

    ``derivation``: why it is true (NCCL source with tag, paper section). ``recording``: the archived job it is needed for.
    ``near_miss``: one that looks alike and that it must leave alone.
    """

    id: str
    stratum: Stratum
    needs: frozenset[FactKind]
    apply: Callable[[Case], Iterable[Fact | Retraction | Hypothesis]]
    defeats: tuple[str, ...] = ()
    derivation: str = ""
    recording: str = ""
    near_miss: str = ""
