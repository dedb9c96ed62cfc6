"""One-shot diagnosis: what two or more samples of the processes of a job say about it.

A pure function of the samples and of what is known besides. Progress between the samples means that the job runs, and nobody is
accused. When nothing moves, rules draw who waits for whom, follow it to its ends, and explain what is there (:mod:`.rules`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from ncclwatch.engine.case import Case, Hypothesis, Known
from ncclwatch.engine.evidence.nics import RETRY_S
from ncclwatch.engine.explain_network import ports_in_use
from ncclwatch.engine.patience import retry_patience
from ncclwatch.engine.rules import RULES, Stratum
from ncclwatch.engine.verdict import render, severity
from ncclwatch.gc_pause import collector_at_rest
from ncclwatch.model.job import Job, Member, assemble
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass

MOST_ROUNDS = 256
"""Bound: times that the graph is solved at most: in a pipeline every stage may lead to the next, twice over."""
NOTHING_OBSERVED = Verdict(
    VerdictClass.UNKNOWN, "no NCCL process is observed", next_steps=("run `ncclwatch ps` on the job's node",)
)
_BY_STRATUM = {stratum: tuple(rules) for stratum, rules in groupby(RULES, lambda rule: rule.stratum)}


def judge_jobs(samples: Sequence[Sequence[ProcessSample]], known: Known | None = None) -> list[tuple[Job, Verdict]]:
    """The jobs with their verdicts, worst first; ``samples``: of each process in time order, two or more, a second apart."""
    known = known or Known()
    with collector_at_rest():
        jobs = assemble(samples)
        for job in jobs:
            for source in known.sources:
                source.complete(job)
        loners = [member for job in jobs if not job.groups for member in job.members]
        verdicts = [(job, _judge(job, known, loners)) for job in jobs]
    return sorted(verdicts, key=lambda judged: severity(judged[1]))


def diagnose(samples: Sequence[Sequence[ProcessSample]], known: Known | None = None) -> Verdict:
    """The worst verdict of :func:`judge_jobs`; ``NOTHING_OBSERVED`` without processes."""
    with collector_at_rest():  # The jobs are gone when it is left, and the collector need not walk them.
        return next((verdict for _, verdict in judge_jobs(samples, known)), NOTHING_OBSERVED)


def _judge(job: Job, known: Known, loners: Sequence[Member]) -> Verdict:
    still = min((member.still_s for member in job.members if not member.gone and len(member.samples) > 1), default=0.0)
    case = Case(job, known, still, job.time, loners)
    _explain(case)
    _weigh(case, Stratum.BESIDE)
    assert case.standing is not None  # noqa: S101 - "unseen" and "nothing-open" leave no gap
    verdict = render(case, case.standing)
    # Facts know their case: in a circle the two would be left to the collector, which walks through all that they hold.
    vars(case).pop("facts", None)
    return verdict


def _explain(case: Case) -> None:
    _weigh(case, Stratum.STATED)
    if case.standing is not None:
        if case.known.patience is not None and case.standing.rule == "halted":
            case.known.patience.halted(case.job)
        return
    case.blind = not case.waits.open
    for rule in _BY_STRATUM[Stratum.DRAW]:
        case.change(rule.id, rule.apply(case))
    _set_patience(case)
    _weigh(case, Stratum.PATIENCE)
    if case.standing is not None:
        return
    # Retract waits and draw weaker ones until nothing changes the graph.
    rules = (*_BY_STRATUM[Stratum.RETRACT], *(_BY_STRATUM[Stratum.FOLLOW] if case.waits.open else ()))
    for _ in range(MOST_ROUNDS):
        if not any(case.change(rule.id, rule.apply(case)) for rule in rules):
            break
    _weigh(case, Stratum.EXPLAIN)
    _weigh(case, Stratum.QUALIFY)


def _weigh(case: Case, stratum: Stratum) -> None:
    """Weigh hypotheses against the one that stands, in order: who names somebody defeats who names nobody, and the table."""
    for rule in _BY_STRATUM[stratum]:
        if case.standing is not None and stratum < Stratum.EXPLAIN:
            return
        for said in rule.apply(case):
            assert isinstance(said, Hypothesis)  # noqa: S101 - by the table
            standing = case.standing
            if said.rule:  # What stands, as this rule sees it.
                case.standing = replace(said, follows=(*said.follows, rule.id))
                continue
            found = replace(said, rule=rule.id)
            wins = standing is None or standing.rule in rule.defeats or (standing.tie and rule.breaks_ties)
            wins = wins or bool(found.suspects and standing is not None and not standing.suspects)
            if standing is not None:
                case.trail.lost.append((standing, found.rule) if wins else (found, standing.rule))
            case.standing = found if wins else standing


def _set_patience(case: Case) -> None:
    """For how many seconds nothing must move before anybody is accused, and before a link that may be about to carry is dead."""
    patience = case.known.patience
    if patience is None:
        return
    patience_s = patience.needed(case)
    retries_s = 0.0 if ports_in_use(case) else retry_patience(case)
    if retries_s <= RETRY_S:
        case.patience_s, case.retries_s = max(patience_s, retries_s), retries_s
        return
    # Something comes through, so that link is slow, which is said at once and teaches nothing.
    patience.halted(case.job)
    case.patience_s, case.retries_s = min(patience_s, patience.floor_s), max(patience_s, retries_s)
