"""How long jobs were down, by phase, as in C4's Table III: detection, diagnosis and isolation, restart, lost work.

What is not seen is inferred, and marked; what can be neither is not known, and adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import groupby

from ncclwatch.history.query import History
from ncclwatch.history.questions import SEEN, Record

ONE_OUTAGE_S = 60.0
"""Unit: s. From: chosen: verdicts of a run that follow one another so closely are of one outage, told in other words."""
SLOW = "slow-"
"""How the classes of jobs begin that go on, only slower: those are not down."""
OUTAGES = """
SELECT job, run, since, time AS told, ended, ended_by, class, nodes, causes, summary FROM incidents
WHERE time >= $since AND ($job = '' OR job = $job) AND NOT starts_with(class, 'slow-') ORDER BY job, run, time
"""
RUNS = f"""
WITH alive AS (SELECT job, run, min(time) AS first, max(time) AS last FROM {SEEN} WHERE run <> '' GROUP BY job, run),
     moving AS (SELECT job, run, min(time) AS began FROM rates WHERE run <> '' AND operations_per_s > 0 GROUP BY job, run),
     paced AS (SELECT job, run, min(time) AS iterated FROM iterations GROUP BY job, run),
     told AS (SELECT job, run, max(time) FILTER (kind = 'end') AS ended FROM runs GROUP BY job, run)
SELECT alive.job, alive.run, first AS begun, ended, last, coalesce(iterated, began) AS working
FROM alive LEFT JOIN told USING (job, run) LEFT JOIN moving USING (job, run) LEFT JOIN paced USING (job, run) ORDER BY begun
"""  # noqa: S608 - a constant of ours


class How(StrEnum):
    """How a duration is known."""

    MEASURED = "measured"
    INFERRED = "inferred"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds, how they are known, and where they were inferred or are not known, why."""

    seconds: float = 0.0
    how: How = How.MEASURED
    why: str = ""


UNSEEN = Phase(0.0, How.UNKNOWN)
PHASES = ("detection", "diagnosis", "restart", "lost_work")


@dataclass(frozen=True, slots=True)
class Outage:
    """One outage of a run: from when nothing moved, to when the job (or its next run) worked again."""

    job: str
    run: str
    began: datetime
    told: datetime
    verdict_class: str
    summary: str
    nodes: Sequence[str]
    detection: Phase
    diagnosis: Phase
    restart: Phase
    lost_work: Phase
    stands: bool = False

    @property
    def seconds(self) -> float:
        """All phases together, as far as they are known."""
        return float(sum(getattr(self, phase).seconds for phase in PHASES))


@dataclass(slots=True)
class Downtime:
    """Outages in their order, and for how long runs were seen in all, seconds."""

    watched_s: float = 0.0
    outages: list[Outage] = field(default_factory=list)

    def total(self, phase: str, how: How | None = None) -> float:
        """Seconds of a phase over all outages; ``how``: of those only that are known so."""
        phases = [getattr(one, phase) for one in self.outages]
        return float(sum(one.seconds for one in phases if how in (None, one.how)))


def downtime(history: History, since: datetime, job: str = "", checkpoint_s: float | None = None) -> Downtime:
    """Every outage since then. ``checkpoint_s``: how often the job writes a checkpoint, where somebody says so: what is lost with
    a run is then half of it on average.
    """
    runs = [one for one in history.ask(RUNS).dicts() if job in ("", one["job"])]
    found = Downtime(sum(_seconds(one["begun"], one["ended"] or one["last"]) for one in runs if one["last"] >= since))
    told = history.ask(OUTAGES, {"since": since, "job": job}).dicts()
    for _, incidents in groupby(told, key=lambda one: (one["job"], one["run"])):
        found.outages += [_outage(group, runs, checkpoint_s) for group in _grouped(list(incidents))]
    found.outages.sort(key=lambda one: one.began)
    return found


def _grouped(incidents: Sequence[Record]) -> list[list[Record]]:
    """Incidents of one run by outage."""
    groups: list[list[Record]] = []
    until = datetime.min
    for one in incidents:
        goes_on = groups and groups[-1][-1]["ended_by"] != "recovery"
        if goes_on and (one["since"] or one["told"]) <= until + timedelta(seconds=ONE_OUTAGE_S):
            groups[-1].append(one)
        else:
            groups.append([one])
        until = max(until, one["ended"] or one["told"])
    return groups


def _outage(group: Sequence[Record], runs: Sequence[Record], checkpoint_s: float | None) -> Outage:
    first, newest = group[0], group[-1]
    own = next((one for one in runs if (one["job"], one["run"]) == (first["job"], first["run"])), None)
    began = first["since"] or first["told"]
    detection = Phase(_seconds(began, first["told"])) if first["since"] else Phase(0.0, How.UNKNOWN, "since when is not known")
    diagnosis = restart = lost = UNSEEN
    stands = False
    if newest["ended_by"] == "recovery":
        # The job went on by itself, or somebody helped it: nothing was restarted, nothing lost.
        diagnosis, restart, lost = Phase(_seconds(first["told"], newest["ended"])), Phase(), Phase()
    else:
        end, how, why = _end(newest, own, runs)
        if end is None:
            stands = True
            last = own["last"] if own is not None else newest["told"]
            diagnosis = Phase(_seconds(first["told"], last), How.INFERRED, "it stands; counted up to when it was last seen")
        else:
            diagnosis = Phase(_seconds(first["told"], end), how, why)
            restart = _restart(first["job"], first["run"], end, runs)
            lost = _lost(checkpoint_s)
    return Outage(
        first["job"], first["run"], began, first["told"], newest["class"] or "", newest["summary"] or "", newest["nodes"] or (),
        detection, diagnosis, restart, lost, stands,
    )  # fmt: skip


def _end(newest: Record, own: Record | None, runs: Sequence[Record]) -> tuple[datetime | None, How, str]:
    """When the run that was down ended."""
    if own is not None and own["ended"] is not None:
        return own["ended"], How.MEASURED, ""
    following = _following(newest["job"], newest["run"], newest["told"], runs)
    if following is not None:
        last = own["last"] if own is not None else newest["told"]
        return max(last, newest["told"]), How.INFERRED, "its end was not seen; up to when it was last seen"
    if newest["ended"] is not None:
        return newest["ended"], How.INFERRED, "up to when the verdict was no longer told"
    return None, How.UNKNOWN, ""


def _following(job: str, run: str, after: datetime, runs: Sequence[Record]) -> Record | None:
    return next((one for one in runs if one["job"] == job and one["run"] != run and one["begun"] >= after), None)


def _restart(job: str, run: str, end: datetime, runs: Sequence[Record]) -> Phase:
    following = _following(job, run, end, runs)
    if following is None:
        return Phase(0.0, How.UNKNOWN, "no later run of it was seen")
    if following["working"] is None:
        return Phase(
            _seconds(end, following["begun"]), How.INFERRED, "up to when its next run was seen; when that worked is not known"
        )
    return Phase(_seconds(end, following["working"]))


def _lost(checkpoint_s: float | None) -> Phase:
    if checkpoint_s is None:
        return Phase(0.0, How.UNKNOWN, "when it wrote its last checkpoint is not seen: say how often with --checkpoint-every")
    return Phase(checkpoint_s / 2, How.INFERRED, "half of what lies between two checkpoints, on average")


def _seconds(begin: datetime, end: datetime) -> float:
    return max(0.0, (end - begin).total_seconds())
