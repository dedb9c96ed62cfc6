"""What each rule of the hang diagnosis, and each term of the slowness estimate, is worth: ``python -m score.ablation`` with
``tests`` on the path prints a table of the rules, with ``--terms`` one of the terms.

**Rules.** A kept recording or a simulated scenario (SIMULATED) is judged once with every rule. At each
sample the job is judged again without each rule that concluded anything, on the same records. Where no judgement differs, nothing
that follows can differ either: that rule costs nothing there. Where one differs, the whole recording is judged without the rule
(of each rule at most ``--replays``), and its timeline is held against what the recording must be judged as.

**Terms.** Of what was weighed of kept slow jobs (``--observations``) a term is left out, the weights of the others are fitted
anew, and the jobs are judged by weights that were fitted without their seed (:mod:`score.slowness`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.engine import diagnose as diagnosis
from ncclwatch.engine.case import Case, Known
from ncclwatch.engine.rules import RULES, Rule
from ncclwatch.engine.slow.calibration import TABLE
from ncclwatch.engine.slow.terms import TERMS
from ncclwatch.model.job import Job, Member
from ncclwatch.model.verdict import Verdict
from ncclwatch.simulate.scenario import Scenario, load_all
from score.archive import JOBS, Kept, batches_of, name_of, recordings_in, timeline_of, wrongs
from score.observations import read
from score.simulated import score_one
from score.slowness import Moment, moments_of, outcome, validate
from score.without import RULE
from unit.engine.test_rules import HELD_BY

KEPT = Path(__file__).resolve().parent.parent / "fixtures" / "slowness.xz"
SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"
NO_VERDICT = "no verdict"
"""What is wrong where a job gets none at all."""


@dataclass(slots=True)
class Cost:
    """What leaving a rule out does: recordings and simulated jobs in which it concludes something, in which any judgement differs
    without it, of those some that were judged again as a whole, and of these the ones in which something is wrong that is not
    with the rule (by name, with what is wrong).
    """

    concludes: set[str] = field(default_factory=set)
    differs: set[str] = field(default_factory=set)
    replayed: set[str] = field(default_factory=set)
    wrong: dict[str, str] = field(default_factory=dict)


@contextmanager
def table(rules: Iterable[Rule]) -> Iterator[None]:
    """The diagnosis with these rules in place of its own."""
    before = dict(diagnosis._BY_STRATUM)
    chosen = tuple(rules)
    try:
        for stratum in before:
            diagnosis._BY_STRATUM[stratum] = tuple(rule for rule in chosen if rule.stratum is stratum)
        yield
    finally:
        diagnosis._BY_STRATUM.update(before)


def without(rule: str) -> list[Rule]:
    """All rules but one."""
    return [one for one in RULES if one.id != rule]


class Screen:
    """Judges as the engine does, and at each judgement once more without each of the rules that concluded something.

    ``concluded`` and ``differing``: those that ever did, and those without which a judgement was another.
    """

    def __init__(self) -> None:
        self.concluded: set[str] = set()
        self.differing: set[str] = set()
        self._judge = diagnosis._judge
        self._now: set[str] = set()

    def __call__(self, job: Job, known: Known, loners: Sequence[Member]) -> Verdict:
        self._now.clear()
        before = _aside(known)
        with table(replace(rule, apply=self._watched(rule)) for rule in RULES):
            said = self._judge(job, known, loners)
        fired = set(self._now)
        self.concluded |= fired
        for rule in fired - self.differing:
            with table(without(rule)):
                if _said(self._judge, job, _aside(before), loners) != _told(said):
                    self.differing.add(rule)
        return said

    def _watched(self, rule: Rule) -> Callable[[Case], Iterator[Any]]:
        def apply(case: Case) -> Iterator[Any]:
            for one in rule.apply(case):
                self._now.add(rule.id)
                yield one

        return apply

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While it judges in the engine's place."""
        diagnosis._judge = self
        try:
            yield
        finally:
            diagnosis._judge = self._judge


def _aside(known: Known) -> Known:
    """What is known, with a memory of its own: what is judged beside leaves no trace."""
    conflicts = copy(known.conflicts)
    conflicts._jobs = dict(conflicts._jobs)
    return replace(known, patience=deepcopy(known.patience), conflicts=conflicts)


def _said(judge: Callable[[Job, Known, Sequence[Member]], Verdict], job: Job, known: Known, loners: Sequence[Member]) -> object:
    try:
        return _told(judge(job, known, loners))
    except AssertionError:
        return NO_VERDICT


def _told(verdict: Verdict) -> Verdict:
    """A verdict without the way by which it came about."""
    return replace(verdict, trail=())


# --- what is wrong without a rule --------------------------------------------------------------------------------------------


def of_recording(path: Path, costs: Mapping[str, Cost], most: int) -> None:
    """Add what leaving out each rule does to one recording of the archive; at most so many are replayed for each rule."""
    name, kept, screen, batches = name_of(path), Kept.load(path), Screen(), batches_of(path)
    with screen.listening():
        whole = timeline_of(batches, kept.since)
    usual = wrongs(kept, whole)
    for rule in _replayed(name, screen, costs, most):
        if new := wrong_without(rule, kept, batches, usual):
            costs[rule].wrong[name] = ", ".join(new)


def wrong_without(rule: str, kept: Kept, batches: Sequence[NodeBatch], usual: Mapping[str, str]) -> list[str]:
    """What is wrong with a recording's timeline without a rule that is not with it (``usual``)."""
    with table(without(rule)):
        try:
            found = wrongs(kept, timeline_of(batches, kept.since))
        except AssertionError:
            found = {NO_VERDICT: ""}
    return sorted(found.keys() - usual.keys())


def of_scenario(scenario: Scenario, costs: Mapping[str, Cost], most: int) -> bool:
    """The same of one simulated job (SIMULATED); whether it is judged rightly with every rule."""
    screen = Screen()
    with screen.listening():
        right = score_one(scenario, with_baselines=False)[0].right
    for rule in _replayed(scenario.name, screen, costs, most):
        with table(without(rule)):
            try:
                kept = score_one(scenario, with_baselines=False)[0].right
            except AssertionError:
                kept = False
        if right and not kept:
            costs[rule].wrong[scenario.name] = "not right"
    return right


def _replayed(name: str, screen: Screen, costs: Mapping[str, Cost], most: int) -> list[str]:
    """Note what a screen has seen; the rules without which all is to be judged again."""
    for rule in screen.concluded:
        costs[rule].concludes.add(name)
    for rule in screen.differing:
        costs[rule].differs.add(name)
    chosen = sorted(rule for rule in screen.differing if len(costs[rule].replayed) < most)
    for rule in chosen:
        costs[rule].replayed.add(name)
    return chosen


# --- the case that each rule is kept for ---------------------------------------------------------------------------------------


def fails_without(rule: str, case: str) -> bool:
    """Whether a case (recording, scenario or test, as ``unit.engine.test_rules`` names it) is judged wrongly without a rule."""
    name = Path(case).name
    if "fixtures" in case:
        path = next(path for path in recordings_in(JOBS) if name_of(path) == name)
        kept, batches = Kept.load(path), batches_of(path)
        return bool(wrong_without(rule, kept, batches, wrongs(kept, timeline_of(batches, kept.since))))
    if "scenarios" in case:
        with table(without(rule)):
            try:
                return not score_one(next(one for one in load_all(SCENARIOS, "") if one.name == name), with_baselines=False)[
                    0
                ].right
            except AssertionError:
                return True
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "score.without", case]
    return subprocess.run(command, env=os.environ | {RULE: rule}, capture_output=True, check=False).returncode == 1


def held_rows() -> Iterator[str]:
    """The table of rules with the case each is kept for, and whether that fails without it."""
    yield "| rule | kept for | wrong without it |"
    yield "|" + " --- |" * 3
    for rule in RULES:
        case = HELD_BY[rule.id][0]
        yield f"| `{rule.id}` | `{case.removeprefix('tests/')}` | {'yes' if fails_without(rule.id, case) else '**no**'} |"


# --- terms -------------------------------------------------------------------------------------------------------------------


def without_term(moments: Sequence[Moment], term: str) -> list[Moment]:
    """The same moments as if a term (or "idle", the rest between iterations) said nothing."""
    if term == "idle":
        return [replace(one, idle=0.0) for one in moments]
    kept = np.array([name != term for name in TERMS], np.float64)
    return [replace(one, terms=replace(one.terms, values=one.terms.values * kept)) for one in moments]


def term_rows(moments: Sequence[Moment], least: float) -> Iterator[str]:
    """The table of terms as Markdown, of jobs that became slow: who is named from a probability on (``least``)."""
    yield "| left out | slow jobs | right | silent | jobs with an innocent |"
    yield "|" + " --- |" * 5
    for term in ("", *TERMS, "idle"):
        chosen = without_term(moments, term) if term else list(moments)
        validate(chosen)
        found = outcome(chosen, least)
        yield f"| {f'`{term}`' if term else 'nothing'} | {found.faulty} | {found.right} | {found.silent} | {found.wrong} |"


def tell_terms(paths: Sequence[Path]) -> None:
    """Print the table of terms; of real jobs alone."""
    jobs = {job.name: job for path in paths for job in read(path) if job.real}
    moments = [moment for job in jobs.values() for moment in moments_of(job) if not moment.start]
    for row in term_rows(moments, TABLE.name_from["since"]):
        print(row, flush=True)


# --- the command -------------------------------------------------------------------------------------------------------------


def rows(real: Mapping[str, Cost], simulated: Mapping[str, Cost]) -> Iterator[str]:
    """The table as Markdown, a row a rule, what costs most first."""
    yield "| rule | recordings: concludes | differs | wrong | simulated jobs: concludes | differs | wrong |"
    yield "|" + " --- |" * 7

    def figures(cost: Cost) -> list[object]:
        return [len(cost.concludes), len(cost.differs), f"{len(cost.wrong)} of {len(cost.replayed)}"]

    for rule in sorted((rule.id for rule in RULES), key=lambda one: [-len(real[one].wrong), -len(simulated[one].wrong), one]):
        cells = [f"`{rule}`", *map(str, (*figures(real[rule]), *figures(simulated[rule])))]
        yield f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when the table was made."""
    parser = argparse.ArgumentParser(prog="score.ablation", description="What each rule of the hang diagnosis is worth.")
    parser.add_argument("--folder", type=Path, default=JOBS, help="recordings with their notes beside them")
    parser.add_argument("--only", default="", help="only recordings and scenarios whose name contains this")
    parser.add_argument("--but", nargs="*", default=(), help="none whose name contains one of these")
    parser.add_argument("--replays", type=int, default=6, help="so many are judged as a whole without each rule")
    parser.add_argument("--set", choices=("ci", "full", "none"), default="ci", help="scenarios that are simulated as well")
    parser.add_argument("--json", type=Path, help="write what is wrong without each rule here, by name")
    parser.add_argument("--held", action="store_true", help="only whether the case that each rule is kept for fails without it")
    parser.add_argument("--terms", action="store_true", help="instead of the rules the terms of the slowness estimate")
    parser.add_argument(
        "--observations", type=Path, nargs="*", default=[KEPT], help="with --terms: files that score.slowness kept"
    )
    options = parser.parse_args(arguments)
    if options.held:
        for row in held_rows():
            print(row, flush=True)
        return 0
    if options.terms:
        tell_terms(options.observations)
        return 0
    real: dict[str, Cost] = defaultdict(Cost)
    simulated: dict[str, Cost] = defaultdict(Cost)
    for path in recordings_in(options.folder):
        if options.only in name_of(path) and not any(but in name_of(path) for but in options.but):
            of_recording(path, real, options.replays)
            print(name_of(path), file=sys.stderr, flush=True)
    scenarios = load_all(SCENARIOS, "ci" if options.set == "ci" else "") if options.set != "none" else []
    for scenario in scenarios:
        if options.only in scenario.name and not ({"quick", "scale"} & set(scenario.tags) and not options.only):
            right = of_scenario(scenario, simulated, options.replays)
            print(f"{scenario.name} (SIMULATED): {'right' if right else 'not right'}", file=sys.stderr, flush=True)
    print("\n".join(rows(real, simulated)))
    if options.json:
        data = {
            name: {rule: cost.wrong for rule, cost in costs.items()} for name, costs in (("real", real), ("simulated", simulated))
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
