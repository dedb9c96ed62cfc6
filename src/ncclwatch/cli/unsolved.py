"""Standstills of which nobody can be named, for surfaces that write lines: verdicts tell only whom something accuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ncclwatch.engine.session import Update
from ncclwatch.model.verdict import Verdict, VerdictClass

TELL_AFTER_S = 30.0
"""Seconds; most checkpoints and evaluations are over by then."""
LONGER = 2.0
"""A job that paused and went on by itself is given so many times that pause, as the engine's patience does."""


class Standstill(NamedTuple):
    """One that has lasted ``seconds``; it is ``over`` once the job moves or somebody is named."""

    verdict: Verdict
    seconds: float
    over: bool = False


@dataclass(slots=True)
class Unsolved:
    """Says of the worst job's standstill, once, that it lasts and nobody is named, and once that it is over."""

    _since_ns: int | None = None
    _told: Verdict | None = None
    _after_s: float = TELL_AFTER_S

    def take(self, update: Update) -> Standstill | None:
        """What there is to tell at this update; most bring nothing."""
        verdict = update.verdict if update.windows is not None else None
        if verdict is None:
            return None
        if verdict.verdict_class is VerdictClass.UNKNOWN:
            self._since_ns = update.now_ns if self._since_ns is None else self._since_ns
            seconds = (update.now_ns - self._since_ns) / 1e9
            if self._told is not None or seconds < self._after_s:
                return None
            self._told = verdict
            return Standstill(verdict, seconds)
        since_ns, told, self._since_ns, self._told = self._since_ns, self._told, None, None
        if told is None or since_ns is None:
            return None
        seconds = (update.now_ns - since_ns) / 1e9
        if not verdict.verdict_class.accuses:
            self._after_s = max(self._after_s, LONGER * seconds)
        return Standstill(told, seconds, over=True)
