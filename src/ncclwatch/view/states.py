"""The state of a rank as a letter and a colour: what a person sees of thousands of ranks at one glance.

The letter alone is enough: it is all there is without colour, and where red and green look the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ncclwatch.collect.windows import RankWindow
from ncclwatch.model.verdict import Place, Verdict, places, stands_in

STILL_S = 2.0
"""A rank whose counters have not moved for this long while an operation is open stands still."""
WAITING_S = 1.0
"""A rank is shown as held up only where its own counters rest: numbers of ranks are not unique when a node runs two jobs."""


@dataclass(frozen=True, slots=True)
class State:
    """One state: its letter, the word for it, its colours (rich style), and how urgent it is (0 is the worst)."""

    letter: str
    word: str
    style: str
    urgency: int


CULPRIT = State("X", "culprit", "bold white on #c01c28", 0)
ENDED = State("D", "ended", "bold white on #813d9c", 1)
STOPPED = State("T", "stopped", "bold white on #a51d2d", 2)
UNREADABLE = State("?", "unreadable", "black on #c0bfbc", 3)
STILL = State("s", "still", "black on #e66100", 4)
WAITING = State("w", "waiting", "black on #f5c211", 5)
UNSEEN = State(".", "not observed", "#9a9996 on #3d3846", 6)
IDLE = State("i", "idle", "white on #1a5fb4", 7)
RUNNING = State("r", "running", "black on #33d17a", 8)

STATES = (CULPRIT, ENDED, STOPPED, UNREADABLE, STILL, WAITING, UNSEEN, IDLE, RUNNING)
BY_LETTER = {state.letter: state for state in STATES}
URGENCY = {state.letter: state.urgency for state in STATES}

_ENDED = frozenset("ZX")
_STOPPED = frozenset("Tt")


@dataclass(frozen=True, slots=True)
class Accused:
    """Whom the standing verdicts name: places, ranks (for those nobody observes), and the ranks that wait."""

    places: frozenset[Place] = frozenset()
    ranks: frozenset[int] = frozenset()
    victims: frozenset[int] = frozenset()

    @classmethod
    def by(cls, verdicts: Collection[Verdict]) -> Accused:
        """Those named by verdicts that accuse somebody."""
        standing = [verdict for verdict in verdicts if verdict.verdict_class.accuses]
        culprits = [culprit for verdict in standing for culprit in verdict.culprits]
        return cls(
            places(culprits),
            frozenset(c.rank for c in culprits if c.rank is not None),
            frozenset(rank for verdict in standing for rank in verdict.victims),
        )


def is_accused(window: RankWindow, accused: Accused) -> bool:
    """Whether a standing verdict names the rank."""
    return bool(accused.places) and stands_in(accused.places, window.process.host, window.process.key.pid, window.rank)


def letter(window: RankWindow, accused: Accused) -> str:
    """The letter of a rank's state."""
    if is_accused(window, accused):
        return "X"
    run_state = window.run_state
    if run_state in _ENDED:
        return "D"
    if run_state in _STOPPED:
        return "T"
    if window.problem:
        return "?"
    still = window.still_s
    rests = still is not None and still >= WAITING_S
    if rests and window.rank in accused.victims:
        # Also without an open operation: in shared memory, over NVLink and in the host's own code a rank waits without one.
        return "w"
    if window.operation is None:
        return "r" if still is not None and still < STILL_S else "i"
    return "s" if still is not None and still >= STILL_S else "r"
