"""What a set of judgements comes to, with exact bounds: hangs, slow jobs whose fault shows, healthy jobs, innocents named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ncclwatch.simulate.scenario import ScoreClass
from score.diagnosers import HANG_CLASSES
from score.exact import Share, share
from score.scoring import Result
from score.table import grid
from score.visible import SLOW_CLASSES


def _part(results: Iterable[Result], classes: Iterable[ScoreClass]) -> list[Result]:
    wanted = set(map(str, classes))
    return [r for r in results if r.score_class in wanted]


def _right(results: Sequence[Result]) -> Share:
    return share(sum(r.right for r in results), len(results))


def shares(results: Iterable[Result], diagnoser: str = "ncclwatch") -> dict[str, Share]:
    """Shares of one diagnoser's judgements by what is asked of them; without those that nothing was played for.

    A judgement is one of a recording; a job counts once for the innocents, however many collectors watched it.
    """
    own = [r for r in results if r.diagnoser == diagnoser]
    slow = _part(own, SLOW_CLASSES)
    jobs: dict[tuple[str, str], bool] = {}
    for r in own:
        words = r.setting.split()
        job = (r.case, " ".join(words[:2] + words[3:]))  # without how the collector came
        jobs[job] = jobs.get(job, False) or bool(r.innocents)
    found = {
        "hangs: right class and place": _right(_part(own, HANG_CLASSES)),
        "slow jobs whose fault shows: right": _right([r for r in slow if r.visible]),
        "slow jobs, all: right": _right(slow),
        "healthy jobs: silent": _right(_part(own, {ScoreClass.CLEAN})),
        "jobs in which an innocent rank was named at any moment": share(sum(jobs.values()), len(jobs)),
    }
    return {what: one for what, one in found.items() if one.of}


def table(results: Iterable[Result], *, markdown: bool) -> str:
    """The shares with their exact 95 % intervals (Clopper-Pearson)."""
    rows = [
        [what, str(one.count), str(one.of), f"{one.count / one.of:.1%}", f"{one.low:.1%} to {one.high:.1%}"]
        for what, one in shares(results).items()
    ]
    return "\n".join(grid(("ncclwatch", "count", "of", "share", "exact 95 % interval"), rows, markdown=markdown)) + "\n"


def as_json(results: Iterable[Result]) -> dict[str, dict[str, Any]]:
    """The same as plain data."""
    return {what: {"count": one.count, "of": one.of, "low": one.low, "high": one.high} for what, one in shares(results).items()}
