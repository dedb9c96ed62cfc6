"""The questions that ``ncclwatch history`` answers by name, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ncclwatch.errors import UsageError
from ncclwatch.history.query import History
from ncclwatch.text import clean

Record = dict[str, Any]
SEEN = """
(SELECT job, run, time FROM runs UNION ALL SELECT job, run, time FROM rates UNION ALL SELECT job, run, time FROM verdicts)
"""
JOBS = f"""
WITH seen AS (SELECT job, run, min(time) AS first, max(time) AS last FROM {SEEN} WHERE run <> '' GROUP BY job, run),
     about AS (SELECT job, run, max(ranks) AS ranks, max(len(nodes)) AS nodes, max(nccl) AS nccl,
                      max(time) FILTER (kind = 'end') AS ended FROM runs GROUP BY job, run),
     paced AS (SELECT job, run, count(*) AS iterations, median(duration_s) AS iteration_s FROM iterations GROUP BY job, run),
     told AS (SELECT job, run, count(*) AS verdicts, count(*) FILTER (ended IS NULL) AS standing, sum(stood_s) AS stood_s,
                     mode(class) AS mostly FROM incidents GROUP BY job, run)
SELECT seen.job, seen.run, first, last, ended, ranks, nodes, nccl, iterations, iteration_s, coalesce(verdicts, 0) AS verdicts,
       coalesce(standing, 0) AS standing, stood_s, mostly
FROM seen LEFT JOIN about USING (job, run) LEFT JOIN paced USING (job, run) LEFT JOIN told USING (job, run)
WHERE last >= $since ORDER BY last DESC, seen.run
"""  # noqa: S608 - a constant of ours
VERDICTS = """
SELECT time, job, run, verdict_id, class, confidence, nodes, ranks, causes, operation, victims, since, ended, ended_by, stood_s,
       summary
FROM incidents WHERE time >= $since AND ($job = '' OR job = $job) AND ($node = '' OR list_contains(nodes, $node))
ORDER BY time DESC LIMIT $most
"""
HEALTH = """
SELECT 'NIC ' || nic AS part, coalesce(state, '') AS what, count(*) AS times, max(time) AS last FROM nics
WHERE node = $node AND time >= $since AND (event <> 'seen' AND event <> 'up' OR errors IS NOT NULL) GROUP BY ALL
UNION ALL
SELECT 'GPU ' || coalesce(gpu::VARCHAR, bus, '?'), coalesce(detail, array_to_string(troubles, ', ')), count(*), max(time)
FROM gpus WHERE node = $node AND time >= $since AND len(troubles) > 0 GROUP BY ALL
UNION ALL
SELECT 'flows over ' || coalesce(device, '?'), state, count(*), max(time) FROM flows
WHERE node = $node AND time >= $since AND state IN ('slow', 'stalled', 'error') GROUP BY ALL
ORDER BY last DESC LIMIT 20
"""
TREND = """
WITH found AS (SELECT * FROM iterations WHERE time >= $since AND job = $job AND ($run = '' OR run = $run)),
     span AS (SELECT epoch(min(time)) AS first, greatest(epoch(max(time)) - epoch(min(time)), 1e-3) AS length FROM found)
SELECT run, min(time) AS begin, max(time) AS until, count(*) AS iterations, median(duration_s) AS median_s,
       quantile_cont(duration_s, 0.99) AS p99_s, max(duration_s) AS longest_s, mode(slowest_rank) AS slowest_rank
FROM found, span GROUP BY run, least(floor((epoch(time) - first) / length * $steps), $steps - 1) ORDER BY begin
"""
GAPS = """
SELECT kind, since, until, coalesce(rows, 0) AS dropped, detail, life FROM gaps WHERE time >= $since
UNION ALL
SELECT 'not watched', ended, begun, 0, 'nobody kept a history', '' FROM (
    SELECT max(CASE WHEN kind = 'end' THEN time END) OVER earlier AS ended, time AS begun, kind,
           sum(CASE kind WHEN 'begin' THEN 1 ELSE -1 END) OVER earlier AS alive
    FROM (SELECT time, kind FROM lives UNION ALL SELECT until, 'end' FROM gaps WHERE kind = 'killed')
    WINDOW earlier AS (ORDER BY time ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
) WHERE kind = 'begin' AND alive = 0 AND ended IS NOT NULL AND begun >= $since
ORDER BY since DESC LIMIT 1000
"""
RUN = """
SELECT (SELECT count(*) FROM iterations WHERE job = $job AND run = $run) AS iterations,
       (SELECT median(duration_s) FROM iterations WHERE job = $job AND run = $run) AS iteration_median_s,
       (SELECT quantile_cont(duration_s, 0.99) FROM iterations WHERE job = $job AND run = $run) AS iteration_p99_s,
       (SELECT median(slowest_s / nullif(median_s, 0)) FROM iterations WHERE job = $job AND run = $run) AS slowest_to_median,
       count(DISTINCT rank) AS ranks, median(operations_per_s) FILTER (still_s < 5) AS operations_per_s,
       median(bytes_per_s) FILTER (still_s < 5) AS bytes_per_s, median(sent_per_s) FILTER (sent_per_s > 0) AS sent_per_s,
       median(latency_p50_us) AS latency_p50_us, quantile_cont(latency_p99_us, 0.99) AS latency_p99_us,
       max(errors) AS errors, epoch(max(time) - min(time)) AS seconds,
       (SELECT count(*) FROM incidents WHERE job = $job AND run = $run) AS verdicts,
       (SELECT count(*) FROM flows WHERE job = $job AND run = $run AND state IN ('slow', 'stalled', 'error')) AS flows_in_trouble,
       (SELECT max(nccl) FROM runs WHERE job = $job AND run = $run) AS nccl,
       (SELECT max(len(nodes)) FROM runs WHERE job = $job AND run = $run) AS nodes
FROM rates WHERE job = $job AND run = $run
"""
MAX_SHOWN = 1000
"""Bound: verdicts of an answer."""


@dataclass(frozen=True, slots=True)
class Blamed:
    """What is known of a node: its incidents (newest first), counts by class and cause, and what else was seen of it."""

    node: str
    incidents: Sequence[Record]
    reasons: Mapping[str, int]
    health: Sequence[Record]
    others: Sequence[str]
    """Names of other nodes that were blamed, like this one where it never was."""


def jobs(history: History, since: datetime) -> list[Record]:
    """A record a run, the newest first."""
    return history.ask(JOBS, {"since": since}).dicts()


def verdicts(history: History, since: datetime, job: str = "", node: str = "", most: int = MAX_SHOWN) -> list[Record]:
    """Incidents, the newest first."""
    return history.ask(VERDICTS, {"since": since, "job": job, "node": node, "most": most}).dicts()


def blamed(history: History, node: str, since: datetime) -> Blamed:
    """Whether, when and for what a node has been blamed."""
    found = verdicts(history, since, node=node)
    reasons: dict[str, int] = {}
    for one in found:
        for reason in one["causes"] or [one["class"] or "?"]:
            reasons[reason] = reasons.get(reason, 0) + 1
    health = history.ask(HEALTH, {"node": node, "since": since}).dicts()
    others: list[str] = []
    if not found:
        wanted = node.lower().partition(".")[0]
        known = history.ask("SELECT DISTINCT unnest(nodes) FROM verdicts ORDER BY 1").rows
        others = [name for (name,) in known if wanted in name.lower()][:8]
    return Blamed(node, found, dict(sorted(reasons.items(), key=lambda item: -item[1])), health, others)


def gaps(history: History, since: datetime) -> list[Record]:
    """What is missing, and when nobody kept a history, the newest first."""
    return history.ask(GAPS, {"since": since}).dicts()


def trend(history: History, job: str, run: str, since: datetime, steps: int) -> list[Record]:
    """Iterations in ``steps`` equal parts of the time, those of two runs apart."""
    return history.ask(TREND, {"job": job, "run": run, "since": since, "steps": steps}).dicts()


def find_run(history: History, named: str) -> tuple[str, str]:
    """The run that is named by its id or the begin of it, by ``JOB@RUN``, or by its job alone (then the newest).

    Raises ``UsageError`` where there is none, or several.
    """
    known = [(one["job"], one["run"]) for one in jobs(history, datetime.min)]
    job, _, run = named.rpartition("@")
    found = [one for one in known if run and one[1].startswith(run) and job in ("", one[0])]
    found = found or [one for one in known if one[0] == named][:1]
    if len(found) == 1:
        return found[0]
    hint = ", ".join(clean(f"{job}@{run}", 80) for job, run in (found or known)[:6]) or "it knows no run yet"
    what = "names several runs" if found else "is no run of this history"
    raise UsageError(f"'{clean(named, 80)}' {what}", f"there are {hint}" if found or known else hint)


def find_job(history: History, named: str) -> tuple[str, str]:
    """(job, run), the run empty where a job was named. Raises as :func:`find_run`."""
    if any(one["job"] == named for one in jobs(history, datetime.min)):
        return named, ""
    return find_run(history, named)


def about_run(history: History, job: str, run: str) -> Record:
    """The figures of a run."""
    return history.ask(RUN, {"job": job, "run": run}).dicts()[0]
