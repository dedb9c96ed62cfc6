"""A recording from beginning to end: when which verdict stood, and what each rank was doing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ncclwatch.model.verdict import Verdict

if TYPE_CHECKING:
    from ncclwatch.engine.session import Update
    from ncclwatch.store.replay import Replay


@dataclass(frozen=True, slots=True)
class Incident:
    """A verdict that accused, from when to when (seconds since the epoch); ``ended`` is ``None`` when it stood at the end."""

    verdict: Verdict
    began: float
    ended: float | None = None


def incidents(replay: Replay, each: Callable[[int, Update], None] | None = None) -> list[Incident]:
    """Play recordings to their end and say what stood when, in order. ``each`` is called with every (time, update)."""
    found: list[Incident] = []
    standing: dict[str, int] = {}
    for time_ns, update in replay.updates():
        now = time_ns / 1e9
        accusing = {verdict.id: verdict for verdict in update.verdicts if verdict.verdict_class.accuses}
        for number in [number for number in standing if number not in accusing]:
            place = standing.pop(number)
            found[place] = replace(found[place], ended=now)
        for number, verdict in accusing.items():
            if number in standing:
                # The newest wording says most.
                found[standing[number]] = replace(found[standing[number]], verdict=verdict)
            else:
                standing[number] = len(found)
                found.append(Incident(verdict, verdict.since or now))
        if each is not None:
            each(time_ns, update)
    return found
