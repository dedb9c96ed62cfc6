"""What may be wrong with a job: hypotheses, each by one rule, and the trail of how they were weighed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ncclwatch.engine.evidence.base import Fact
from ncclwatch.model.verdict import Culprit, VerdictClass


class Cause(StrEnum):
    """Why a culprit holds the job up; a closed list. Words for people are made of it last (``verdict.py``)."""

    STOPPED = "stopped"
    ENDED = "ended"
    NOT_CALLED = "not-called"
    LEFT_OUT = "left-out"
    CALLED_OTHER = "called-other"
    ORDER = "order"
    GPU_NOT_BEGUN = "gpu-not-begun"
    GPU_STALLED = "gpu-stalled"
    PROXY_STALLED = "proxy-stalled"
    LINK = "link"
    PORT = "port"
    PATH = "path"
    LINK_RETRIES = "link-retries"
    NOT_JOINED = "not-joined"
    NCCL_ERROR = "nccl-error"
    CPU_LIMIT = "cpu-limit"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One explanation of a standstill by one rule. ``confidence`` is between 0 and 1, measured per rule (docs/scoreboard.md).

    ``tie``: all sides of a disagreement are named, since nothing tells who is wrong.
    """

    rule: str
    verdict_class: VerdictClass
    cause: Cause
    culprits: tuple[Culprit, ...] = ()
    victims: frozenset[int] = frozenset()
    """Indices of the processes that wait for the culprits."""
    confidence: float = 0.0
    supports: tuple[Fact, ...] = ()
    missing: tuple[str, ...] = ()
    """What was not observed and might have told otherwise."""
    tie: bool = False


@dataclass(frozen=True, slots=True)
class Retraction:
    """A fact that counts no longer, and the rule that says so."""

    fact: Fact
    rule: str
    why: str


@dataclass(slots=True)
class Trail:
    """How a verdict came about: what ``ncclwatch diagnose --why`` prints. Bounded by who writes it."""

    facts: list[Fact] = field(default_factory=list)
    retractions: list[Retraction] = field(default_factory=list)
    hypotheses: list[Hypothesis] = field(default_factory=list)
    defeated: list[tuple[Hypothesis, Hypothesis]] = field(default_factory=list)
    """(lost, won)"""
    missing: list[str] = field(default_factory=list)
