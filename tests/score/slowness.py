"""Derive the weights and thresholds of the slowness estimate: ``python -m score.slowness`` (``make calibrate``), ``tests`` on
the path.

Reads recordings of real jobs with known faults and healthy ones (``--recordings``), simulates drawn scenarios beside them,
collects the terms of every judged moment, and fits one conditional logit each for jobs that became slow and jobs that were slow
from the start. Everything that is reported of it is cross-validated by job; fresh seeds judge the result,
never these.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.engine.slow import attribute, calibration
from ncclwatch.engine.slow.calibration import TABLE, Weights
from ncclwatch.engine.slow.findings import FEWEST_PAST, Context, RoundTrips
from ncclwatch.engine.slow.profile import Profile, add_up
from ncclwatch.engine.slow.snapshot import Look
from ncclwatch.engine.slow.terms import NETWORKS, TERMS, WORK, CandidateKind, Terms, measure
from ncclwatch.model.job import Job
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.simulate.scenario import FaultKind, Scenario, ScoreClass, load_all
from score import network
from score.archive import Kept, batches_of, beside, name_of, recordings_in
from score.cases import Case
from score.diagnosers import Ncclwatch
from score.drawn import draw
from score.observations import Observation, Observed, read, write
from score.real import Saved, expected

EVERY = 2
"""Of the judged moments of a job, which hardly differ from one to the next, every second is fitted to."""
FEWEST_SAMPLES = 3
FEWEST_PRETENDED = 6
"""Samples of a healthy half."""
PRETENDED = (0.08, 0.15, 0.3, 0.5)
"""Shares of the time that are said to be lost there."""
RIDGE = 0.1
"""Strength of the penalty on weights, chosen by cross-validation by job among 0.3, 0.1 and 0.03: a term that few jobs show stays
small.
"""
REAL_WEIGHT = 3.0
"""A real job counts as much as three simulated ones."""
HEALTHY_WEIGHT = 0.3
"""The same of a healthy stretch that is said to have become slow, of which every job has one. From: cross-validation by seed on
174 real jobs: of 125 slow ones with 1, 0.3 and 0.1 right 107, 111 and 110, innocents named in 5, 4 and 4.
"""
HEALTHY = "-healthy"
"""Ends the name of such a stretch."""
STEPS, RATE = 350, 0.06
"""Of the gradient ascent (Adam); it has converged by then to the second digit."""
FOLDS = 5
WRONG_AT_MOST = {"healthy": 0.01, "slow": 0.02}
"""The chosen false-alarm figure: in how many jobs anybody innocent may be named at any moment. A hundredth of those that are
healthy, as far as they are (each is judged as one that may be slow from the start); a fiftieth of those that are slow for
certain, in which somebody is to be found.
"""
CHANGE = 4.5
"""Natural logarithm of the Bayes factor from which on iteration times have changed: of 47 real recordings no healthy stretch on a
machine that was not starved reaches it, and of the slow ones whose mean grew by a twentieth all do but two (seed 1001).
"""
LEAST_NAMED = 0.65
"""Nobody is named who is hardly likelier than not."""
KINDS = tuple(kind.value for kind in CandidateKind)
COLUMNS = (*TERMS, *KINDS, "nobody", "idle")


@dataclass(slots=True)
class Moment:
    """One judged moment of one job: what was weighed, and the truth, which only this module sees."""

    job: str
    real: bool
    start: bool
    """Whether the job had no healthy past."""
    ranks: list[int | None]
    terms: Terms
    idle: float
    right: NDArray[np.bool_]
    """For each candidate whether naming it is right; none before the fault shows."""
    guilty: NDArray[np.bool_]
    """For each whether nobody else is named by it: of two culprits also one."""
    chances: NDArray[np.float64] | None = None
    fitted: bool = True
    """Whether weights are fitted to it; it is judged in any case."""

    def table(self) -> NDArray[np.float64]:
        """Columns of every candidate and of nobody, which comes last: shape (candidates + 1, columns)."""
        size = len(self.terms.members)
        table = np.zeros((size + 1, len(COLUMNS)))
        table[:-1, : len(TERMS)] = self.terms.values
        table[np.arange(size), len(TERMS) + np.array([KINDS.index(kind.value) for kind in self.terms.kinds])] = 1.0
        table[-1, COLUMNS.index("nobody")] = 1.0
        table[-1, COLUMNS.index("idle")] = self.idle
        return table

    def answers(self) -> NDArray[np.bool_]:
        """Which of the candidates and nobody may be said."""
        return np.append(self.right, not self.right.any())


# --- collecting --------------------------------------------------------------------------------------------------------------


class _Collector:
    """Listens to what a session weighs.

    Of a healthy stretch it also keeps what would be weighed if the job had become slow in the middle of it: nobody is to be named
    then, and how far chance alone goes is learned.
    """

    def __init__(self, observed: Observed, since: float) -> None:
        self.observed, self.since = observed, since

    def __call__(self, job: Job, looks: Sequence[Look], profile: Profile, context: Context, trips: RoundTrips) -> None:
        if profile.looks < FEWEST_SAMPLES:
            return
        now = max(member.last.time_ns for member in job.members) / 1e9
        shows = now >= self.since and bool(self.observed.verdicts)
        one = Observation([member.rank for member in job.members], profile, context, shows)
        if context.lost is None and not one.shows:
            self._pretend(list(looks), one, trips)
        self.observed.observations.append(one)

    def _pretend(self, looks: list[Look], one: Observation, trips: RoundTrips) -> None:
        """Keep the newest half of a healthy stretch as if it were slower than the half before."""
        if len(looks) < 2 * FEWEST_PRETENDED:
            return
        half = len(looks) // 2
        lost = PRETENDED[len(looks) % len(PRETENDED)]
        since, trips = looks[half].time, deepcopy(trips)
        processes, context = one.profile.processes, one.context
        pretended = replace(
            context, lost=lost, before=add_up(looks[:half], processes), alike=context.equal,
            delayed=trips.delayed(since),
        )  # fmt: skip
        self.observed.observations.append(
            replace(one, profile=add_up(looks[half:], processes), context=pretended, shows=False, pretended=True)
        )


def moments_of(job: Observed) -> list[Moment]:
    """What is fitted to and judged of a job: all moments, and all pretended ones; weights are fitted to every second, the last
    among them.
    """
    series: dict[bool, list[Moment]] = {False: [], True: []}
    for one in job.observations:
        terms = measure(one.profile, one.context)
        nobody = np.zeros(len(terms.members), np.bool_)
        right, guilty = _right(job, terms, one.ranks) if one.shows else (nobody, nobody)
        name, start = job.name + (HEALTHY if one.pretended else ""), one.context.lost is None
        series[one.pretended].append(Moment(name, job.real, start, one.ranks, terms, one.context.idle, right, guilty))
    for made in series.values():
        for number, moment in enumerate(reversed(made)):
            moment.fitted = number % EVERY == 0
    return [*series[False], *series[True]]


def _right(job: Observed, terms: Terms, ranks: Sequence[int | None]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For each candidate whether it is all who are at fault and nobody else, and whether it is nobody else. Where no candidate is
    all of them, those that are some are right.
    """
    wanted, allowed, verdicts = set(job.wanted), {*job.wanted, *job.also}, set(job.verdicts)
    named = [{ranks[at] for at in members} for members in terms.members]
    some = np.array(
        [bool(_classes(kind) & verdicts) and who <= allowed for kind, who in zip(terms.kinds, named, strict=True)], np.bool_
    )
    if not wanted or job.hidden:
        return some, some
    every = some & np.array([wanted <= who for who in named], np.bool_)
    return (every if every.any() else some), some


def _classes(kind: CandidateKind) -> set[str]:
    """The classes of verdicts that a candidate may be part of."""
    return {"slow-mixed", "slow-computation" if kind in WORK else "slow-communication"}


def mixed(scenario: Scenario) -> Scenario | None:
    """A scenario of a loaded host whose links are shared with other traffic as well; none of another scenario."""
    loads = [fault for fault in scenario.faults if fault.kind is FaultKind.HOST_LOAD]
    if not loads:
        return None
    traffic = replace(loads[0], kind=FaultKind.BACKGROUND_TRAFFIC, strength=20.0, delay_ms=2.0)
    expect = replace(scenario.expect, score_class=ScoreClass.S3, verdicts=(VerdictClass.SLOW_MIXED,))
    work = replace(scenario.workload, dp_bytes=max(scenario.workload.dp_bytes, 128 << 20))
    return replace(scenario, name=f"{scenario.name}-mixed", faults=(*scenario.faults, traffic), expect=expect, workload=work)


def of_recording(path: Path, known: dict[str, Scenario]) -> Observed:
    """What is weighed of a recorded real job, of the archive or as a run saved it; ``known``: the scenarios that have files."""
    name = name_of(path)
    if "scenario" in _note(path):
        saved = Saved.load(path)
        scenario = expected(scenario_of(saved.scenario, known), saved)
        wanted = network.wanted(scenario) if saved.scenario.startswith(network.PREFIX) else scenario
        collector = _Collector(_observed(name, wanted, real=True), saved.since)
    else:
        kept = Kept.load(path)
        observed = Observed(name, True, kept.ranks, kept.also, kept.verdicts, hidden=False, observations=[])
        collector = _Collector(observed, kept.since)
    session = DiagnosisSession()
    session.diagnosis.slow.observer = collector
    for batch in batches_of(path):
        session.feed(batch)
        if batch.looked:
            session.judge(batch.time_ns)
    return collector.observed


def _observed(name: str, scenario: Scenario, *, real: bool) -> Observed:
    """Nothing yet, and the truth of it."""
    expect = scenario.expect
    return Observed(
        name, real, tuple(expect.ranks), tuple(expect.also), tuple(map(str, expect.verdicts)),
        scenario.network.intra_node == "p2p", [],
    )  # fmt: skip


def scenario_of(name: str, known: dict[str, Scenario]) -> Scenario:
    """A scenario by its name: of a file, or drawn (``drawn-SEED-NUMBER-…``, ``drawn-slow-SEED-NUMBER-…``, ``network-…``)."""
    if name in known:
        return known[name]
    if name.startswith(network.PREFIX):
        return network.scenario_of(name)
    parts = name.split("-")
    slow = parts[1] == "slow"
    return draw(int(parts[1 + slow]), int(parts[2 + slow]), slow=slow)


def of_scenario(scenario: Scenario) -> Observed:
    """What is weighed of a simulated job (SIMULATED)."""
    case = Case(scenario, shift=sum(map(ord, scenario.name)) % 48)
    *_, last = case.moments()
    collector = _Collector(_observed(scenario.name, scenario, real=False), case.effect_s)
    Ncclwatch(collector, case.every).diagnose(last.records, last.clock_s)
    return collector.observed


# --- fitting -----------------------------------------------------------------------------------------------------------------


def fit(moments: Sequence[Moment]) -> NDArray[np.float64]:
    """Weights of ``COLUMNS`` that make the right answers likeliest: conditional logit, each job with one voice, ridge penalty.

    Weights of terms are not negative: none of them is evidence against what it is there to show.
    """
    moments = [moment for moment in moments if moment.fitted]
    number: dict[str, int] = defaultdict(int)
    for moment in moments:
        number[moment.job] += 1
    tables = [moment.table() for moment in moments]
    stacked, answers = np.concatenate(tables), np.concatenate([moment.answers() for moment in moments]).astype(np.float64)
    sizes = [len(table) for table in tables]
    segment, starts = np.repeat(np.arange(len(tables)), sizes), np.r_[0, np.cumsum(sizes)[:-1]]
    weight = [(REAL_WEIGHT if one.real else 1.0) * (HEALTHY_WEIGHT if one.job.endswith(HEALTHY) else 1.0) for one in moments]
    voice = np.array(weight) / [number[moment.job] for moment in moments]
    weights, mean, square = np.zeros(len(COLUMNS)), np.zeros(len(COLUMNS)), np.zeros(len(COLUMNS))
    fixed = COLUMNS.index("rank")  # intercepts are told against that of a rank
    for step in range(1, STEPS + 1):
        odds = stacked @ weights
        shares = np.exp(odds - np.maximum.reduceat(odds, starts)[segment])
        shares /= np.add.reduceat(shares, starts)[segment]
        right = shares * answers
        right /= np.maximum(np.add.reduceat(right, starts), 1e-12)[segment]
        gradient = stacked.T @ ((right - shares) * voice[segment]) - RIDGE * weights
        gradient[fixed] = 0.0
        mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
        weights = weights + RATE * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.99**step)) + 1e-8)
        weights[: len(TERMS)] = np.maximum(weights[: len(TERMS)], 0.0)
    return weights


def as_weights(fitted: NDArray[np.float64], jobs: int) -> Weights:
    """As the engine's table holds them."""
    named = {name: round(float(value), 3) for name, value in zip(COLUMNS, fitted, strict=True)}
    terms = {name: named[name] for name in (*TERMS, "idle")}
    return Weights(terms, {kind: named[kind] for kind in KINDS}, named["nobody"], jobs)


def validate(moments: Sequence[Moment], seed: int = 0) -> None:
    """Give every moment its chances by weights that were fitted without its job: without all jobs of its seed, where jobs are
    drawn, since those were played in one night on one machine.
    """
    jobs = sorted({moment.job for moment in moments})
    np.random.default_rng(seed).shuffle(jobs)
    fold = {job: _seed_of(job) or str(at % FOLDS) for at, job in enumerate(jobs)}
    for one in sorted(set(fold.values())):
        weights = fit([moment for moment in moments if fold[moment.job] != one])
        for moment in (moment for moment in moments if fold[moment.job] == one):
            odds = moment.table() @ weights
            shares = np.exp(odds - odds.max())
            moment.chances = (shares / shares.sum())[:-1]


def _seed_of(job: str) -> str:
    """The seed that a job was drawn from (``drawn-SEED-NUMBER-...``, ``drawn-slow-SEED-NUMBER-...``); empty for another."""
    found = re.match(r"drawn-(?:slow-)?(\d+)-", job)
    return f"seed {found[1]}" if found else ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What naming from a probability on gives, cross-validated: faulty jobs, right ones at their last moment, silent ones, and
    jobs in which anybody innocent was named at any moment.
    """

    jobs: int
    faulty: int
    right: int
    silent: int
    wrong: int


def outcome(moments: Sequence[Moment], least: float) -> Outcome:
    """Judge every job as the engine would: two moments in a row that name the same."""
    by_job: dict[str, list[Moment]] = defaultdict(list)
    for moment in moments:
        by_job[moment.job].append(moment)
    faulty = right = silent = wrong = 0
    for series in by_job.values():
        said = [_said(moment, least) for moment in series]
        named = [
            one for before, one in itertools.pairwise(said) if one is not None and before is not None and one.who == before.who
        ]
        wrong += any(not one.guilty for one in named)
        if any(moment.right.any() for moment in series):
            faulty += 1
            right += bool(named) and named[-1].right
            silent += not named
    return Outcome(len(by_job), faulty, right, silent, wrong)


@dataclass(frozen=True, slots=True)
class _Said:
    """Whom a moment names, whether they are all who are at fault, and whether they are nobody else."""

    who: object
    right: bool
    guilty: bool


def _said(moment: Moment, least: float) -> _Said | None:
    if moment.chances is None:
        return None
    context = Context(np.zeros(0, np.int64), np.zeros(len(moment.ranks), np.int64), None)
    found = attribute.likeliest(moment.terms, moment.chances, least, context)
    if found is None:
        return None
    at = found.number
    return _Said((moment.terms.kinds[at] in WORK, found.members), bool(moment.right[at]), bool(moment.guilty[at]))


def threshold(moments: Sequence[Moment], wrong: float) -> float:
    """The smallest probability from which on naming somebody is wrong in few enough jobs: this share of them, or one."""
    if not moments:
        raise ValueError("no jobs to calibrate with")
    tried = []
    for least in np.arange(LEAST_NAMED, 0.991, 0.01).round(2).tolist():
        result = outcome(moments, least)
        if result.wrong <= max(1, round(wrong * result.jobs)):
            return float(least)
        tried.append((result.wrong, -result.right, least))
    return float(min(tried)[-1])


def beside_threshold(jobs: Sequence[Observed], weights: Weights, since: float) -> float:
    """The smallest probability from which on nobody innocent is named beside a slow network, in any real job: by two moments in
    a row that say the same. No real job here has two causes, so all who are named so are innocent.
    """
    known = [
        [o for o in job.observations if o.context.past is not None and o.profile.looks >= FEWEST_PAST] for job in jobs if job.real
    ]
    series = [[one for one in part if one.pretended == pretended] for part in known for pretended in (False, True)]
    for least in np.arange(LEAST_NAMED, 0.991, 0.01).round(2).tolist():
        said = [[_beside(one, weights, since, least) for one in part] for part in series]
        wrong = [any(one and one == before for before, one in itertools.pairwise(part)) for part in said]
        if not any(wrong):
            return float(least)
        # Where nobody is named from one probability on, hardly anybody is from a higher one.
        series = [part for part, at in zip(series, wrong, strict=True) if at]
    return 0.99


def _beside(one: Observation, weights: Weights, since: float, least: float) -> tuple[object, ...]:
    """The network that a moment names, and whoever is said to work beside it; nothing where nobody is."""
    terms = measure(one.profile, one.context)
    chances = attribute.posterior(attribute.log_odds(terms, weights), weights, one.context.idle)
    named = attribute.likeliest(terms, chances, since, one.context)
    if named is None or terms.kinds[named.number] not in NETWORKS:
        return ()
    found = attribute.beside(one.profile, one.context, terms, named, weights, least)
    return (named.members, *(other.members for other in found)) if found else ()


# --- the command -------------------------------------------------------------------------------------------------------------


def collect(options: argparse.Namespace) -> list[Observed]:
    """Of all jobs; of recordings and scenarios that were read before from the cache."""
    known = {scenario.name: scenario for scenario in load_all(Path(__file__).resolve().parent.parent / "scenarios", "")}
    paths = [path for folder in options.recordings for path in recordings_in(folder) if _is_told(path)]
    drawn = [draw(options.seed, number, slow=True) for number in range(options.simulated)]
    drawn += [s for n in range(4 * options.healthy) if (s := draw(options.seed + 1, n)).expect.score_class is ScoreClass.CLEAN][
        : options.healthy
    ]
    drawn += [both for scenario in drawn if (both := mixed(scenario)) is not None]
    several = (draw(options.seed + 2, number, slow=True) for number in range(16 * options.pairs))
    drawn += [scenario for scenario in several if len(scenario.faults) > 1][: options.pairs]
    drawn = [scenario for scenario in drawn if scenario.layout.world <= options.largest]
    options.cache.mkdir(parents=True, exist_ok=True)
    jobs = [job for path in options.observations for job in read(path)]
    there = {job.name for job in jobs}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        waiting = [
            pool.submit(_cached, options.cache / f"real-{name_of(path)}", partial(of_recording, path, known))
            for path in paths
            if name_of(path) not in there
        ]
        waiting += [pool.submit(_cached, options.cache / f"sim-{s.name}", partial(of_scenario, s)) for s in drawn]
        for future in waiting:
            jobs.append(future.result())
            print(f"{jobs[-1].name}: {len(jobs[-1].observations)} moments", file=sys.stderr, flush=True)
    return jobs


def _note(path: Path) -> dict[str, Any]:
    """What is written beside a recording; nothing, where there is nothing."""
    note = beside(path, ".json")
    return json.loads(note.read_text("utf-8")) if note.exists() else {}


def _is_told(path: Path) -> bool:
    """Whether the truth is beside it: of the archive, jobs that are slow or healthy."""
    note = _note(path)
    return "scenario" in note or ("verdicts" in note and all(verdict.startswith("slow") for verdict in note["verdicts"]))


def _cached(path: Path, make: Callable[[], Observed]) -> Observed:
    """What was collected before, if it was."""
    if not path.exists():
        write([make()], path)
    return read(path)[0]


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when the table was written."""
    parser = argparse.ArgumentParser(prog="score.slowness", description="Derive the slowness estimate's weights and thresholds.")
    parser.add_argument(
        "--recordings", type=Path, nargs="*", default=[], help="folders of recordings with their notes beside them"
    )
    parser.add_argument("--observations", type=Path, nargs="*", default=[], help="files that --keep wrote")
    parser.add_argument("--keep", type=Path, help="write what was weighed of all real jobs here")
    parser.add_argument("--simulated", type=int, default=50, help="drawn slow scenarios to simulate")
    parser.add_argument("--healthy", type=int, default=40, help="drawn healthy scenarios to simulate")
    parser.add_argument("--pairs", type=int, default=16, help="drawn scenarios with two culprits to simulate")
    parser.add_argument("--largest", type=int, default=16, help="ranks of a simulated job at most")
    parser.add_argument("--seed", type=int, default=2001)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path("build/slowness"))
    parser.add_argument(
        "--keep-weights", action="store_true",
        help="only who is named from which probability once a job has become slow, of recordings that no weight has seen",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="write the table here (default: print what was found only)")
    options = parser.parse_args(arguments)
    if options.keep_weights:
        options.simulated = options.healthy = options.pairs = 0
    jobs = collect(options)
    if options.keep:
        write([job for job in jobs if job.real], options.keep)
    moments = [moment for job in jobs for moment in moments_of(job)]
    parts = {"since": [one for one in moments if not one.start], "start": [one for one in moments if one.start]}
    if options.keep_weights:
        _write(_named_from([one for one in parts["since"] if not one.job.endswith(HEALTHY)]), options.out)
        return 0
    name_from: dict[str, float] = {}
    table: dict[str, Any] = {}
    note: dict[str, Any] = {
        "made by": "make calibrate",
        "chosen": {"innocent ranks named in at most this share of jobs": WRONG_AT_MOST},
    }
    for name, chosen in parts.items():
        count = len({moment.job for moment in chosen})
        validate(chosen)
        counted = [moment for moment in chosen if moment.real] if name == "since" else []
        name_from[name] = threshold(counted or chosen, WRONG_AT_MOST["slow"])
        if name == "start":
            healthy = [moment for moment in chosen if not moment.right.any()]
            name_from[name] = max(name_from[name], threshold(healthy, WRONG_AT_MOST["healthy"]))
        result, weights = outcome(chosen, name_from[name]), as_weights(fit(chosen), count)
        table[name] = {"terms": weights.terms, "kinds": weights.kinds, "nobody": weights.nobody, "jobs": count}
        real = len({moment.job for moment in chosen if moment.real})
        note[name] = {
            "jobs": count, "real": real, "faulty": result.faulty, "right": result.right, "silent": result.silent,
            "wrong": result.wrong,
        }  # fmt: skip
        print(f"{name}: {note[name]} from {name_from[name]}")
        every = {**weights.terms, **weights.kinds, "nobody": weights.nobody}
        print("  " + ", ".join(f"{key} {value:g}" for key, value in every.items()))
        if name == "since":
            name_from["beside"] = beside_threshold(jobs, weights, name_from[name])
    table["name_from"], table["note"] = name_from, note
    table["change_log_bayes_factor"] = CHANGE
    _write(table, options.out)
    return 0


def _named_from(unseen: Sequence[Moment]) -> dict[str, Any]:
    """The table as it is, but for the probability from which on somebody is named in a job that became slow. It is derived from
    jobs that no weight has seen, so that nothing need be left out of the fit to judge them.
    """
    for moment in unseen:
        moment.chances = attribute.posterior(attribute.log_odds(moment.terms, TABLE.since), TABLE.since, moment.idle)
    least = threshold(unseen, WRONG_AT_MOST["slow"])
    table: dict[str, Any] = json.loads(Path(calibration.__file__).with_name(calibration.FILE).read_text("utf-8"))
    table["name_from"]["since"] = least
    table["note"]["chosen"] = {"innocent ranks named in at most this share of jobs": WRONG_AT_MOST}
    table["note"]["named from"] = {"made by": "score.slowness --keep-weights", "since": least, **asdict(outcome(unseen, least))}
    print(table["note"]["named from"])
    return table


def _write(table: dict[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(table, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    # What is kept is of this module, not of ``__main__``.
    sys.exit(import_module("score.slowness").main())
