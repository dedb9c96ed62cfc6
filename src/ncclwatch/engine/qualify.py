"""What ports, dead paths, TCP, GPUs and CPU limits add to a verdict."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.engine.case import Case
from ncclwatch.engine.cpu_limits import add_cpu_limits, crawl_patience, merely_crawls
from ncclwatch.engine.dead_paths import blame_dead_paths
from ncclwatch.engine.device import add_device_evidence
from ncclwatch.engine.hypotheses import Cause, Hypothesis
from ncclwatch.engine.ports import blame_ports
from ncclwatch.engine.suspects import accused
from ncclwatch.engine.verdict import render
from ncclwatch.model.verdict import Verdict, VerdictClass


def qualify(case: Case, verdict: Verdict) -> Verdict:
    """A verdict with what other evidence says of it."""
    job = case.job
    standing = case.standing
    assert standing is not None
    if standing.rule not in STATED:
        verdict = _network(case, standing, verdict)
    if standing.rule not in ("all-ended", "one-sample", "progress") and case.newcomers:
        # Where those stand who were looked at once is known, and others may wait for them; whether they move is not.
        if verdict.verdict_class.accuses and not case.newcomers.isdisjoint(accused(job, verdict.culprits)):
            verdict = render(case, Hypothesis("one-sample", VerdictClass.UNKNOWN, Cause.ONE_SAMPLE))
        else:
            number = len(case.newcomers)
            what = "1 process was" if number == 1 else f"{number} processes were"
            line = f"{what} looked at only once so far: whether anything moves there is not known yet"
            verdict = replace(verdict, unobserved=(*verdict.unobserved, line))
    return add_cpu_limits(job, add_device_evidence(job, verdict))


STATED = {"all-ended", "one-sample", "progress", "stopped", "ended", "creating", "not-joined", "pause", "ended-behind"}


def _network(case: Case, standing: Hypothesis, verdict: Verdict) -> Verdict:
    if case.trail.fired.get("rest"):
        return verdict
    known, still, time = case.known, case.still, case.time
    verdict = blame_ports(case, verdict, known.ports_down)
    if still < case.retries_s:
        if standing.rule in ("link", "cut-off") and verdict.verdict_class is VerdictClass.HARDWARE:
            suspects = tuple(
                replace(suspect, cause=Cause.PORT_RETRIES) if suspect.cause is Cause.CUT_OFF else suspect
                for suspect in standing.suspects
            )
            slow = standing.amended("tcp-slow", verdict_class=VerdictClass.SLOW_COMMUNICATION, suspects=suspects, seconds=still)
            verdict = replace(render(case, slow), next_steps=verdict.next_steps)
        else:
            verdict = render(case, Hypothesis("tcp-pause", VerdictClass.UNKNOWN, Cause.PAUSE, seconds=case.retries_s))
    verdict = blame_dead_paths(case, verdict, known.dead_paths)
    longer = crawl_patience(case.patience_s)
    if still >= longer:
        return verdict
    pause = render(case, Hypothesis("pause", VerdictClass.UNKNOWN, Cause.PAUSE, seconds=longer))
    return merely_crawls(case.job, verdict, pause) or verdict
