"""The live engine on simulated records of slow and healthy jobs, round by round, as an agent hands them over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.engine.slow import watch
from ncclwatch.engine.slow.snapshot import Activity
from ncclwatch.engine.slow.watch import SEARCHING_SAMPLES
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.simulate.records import Observer
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import Fault, FaultKind, Scenario, load
from score.cases import effect
from score.diagnosers import rounds

SCENARIOS = Path(__file__).resolve().parent.parent.parent.parent / "scenarios"


def judged(
    scenario: Scenario,
    seconds: float,
    planes: tuple[str, ...] = ("calls", "state"),
    *,
    apart_s: float = 0.0,
    stands_s: int = 0,
    asked: bool = False,
) -> list[tuple[float, Verdict]]:
    """What stood after each round, with the time since the fault began (of a healthy job: since its first iteration).

    With ``apart_s`` every second host seems to have been looked at so much later, with ``stands_s`` nothing moves for so long
    at the end. ``asked``: somebody asks in every round, and is told the same.
    """
    scenario = replace(scenario, observe=replace(scenario.observe, planes=planes))
    timeline = simulate(scenario)
    since = effect(timeline)
    end = min(timeline.end - 0.1, since + seconds)
    records = Observer(timeline, [float(t) for t in np.arange(0.7, end, 1.0)]).until(end)
    live = LiveDiagnosis()
    done: defaultdict[str, int] = defaultdict(int)
    said = []
    for round_ in rounds(records):
        latest = max(sample.time_ns for sample in round_)
        late_ns = int(apart_s * 1e9)
        hosts = sorted({sample.process.host for sample in round_})
        moved = [replace(s, wall_ns=s.wall_ns + late_ns * (hosts.index(s.process.host) % 2)) for s in round_]
        for host, events in records.calls.items():
            upto = int(np.searchsorted(events["time_ns"], latest, "right"))
            live.add_calls(events[done[host] : upto])
            done[host] = upto
        if asked:
            live.ask()
        said.append((latest / 1e9 - 1000.0 - since, live.update(moved)))
        if asked:
            answers, live.answers = live.answers, []
            assert answers == live.verdicts
    for more in range(1, stands_s + 1):
        later = [replace(s, time_ns=s.time_ns + more * 1_000_000_000, wall_ns=s.wall_ns + more * 1_000_000_000) for s in moved]
        said.append((said[-1][0] + 1.0, live.update(later)))
    return said


def accusations(said: list[tuple[float, Verdict]]) -> list[tuple[float, Verdict]]:
    return [(time, verdict) for time, verdict in said if verdict.verdict_class.accuses]


def test_looks_of_several_moments_name_nobody() -> None:
    """Who waits for whom in a job that runs cannot be told from hosts looked at half a second apart."""
    assert accusations(judged(load(SCENARIOS / "s2-slow-link.toml"), 10.0, apart_s=0.6)) == []


def test_more_samples_are_taken_once_a_job_has_been_slow_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lasts a moment is no reason: on full cores samples would make the moment longer."""
    monkeypatch.setattr(watch, "SETTLED_SAMPLES", 3)
    unwatched, said = LiveDiagnosis.update, []

    def update(live: LiveDiagnosis, samples: Sequence[ProcessSample]) -> Verdict:
        verdict = unwatched(live, samples)
        heard = {sample.process.host: max(s.time_ns for s in samples) / 1e9 for sample in samples}
        few = all(live.slow.settles(job, verdict, heard) for job, verdict in live.judged)
        slow_s = max(one.iterations.slow_s for one in live.slow._jobs.values())
        said.append((few, slow_s))
        return verdict

    monkeypatch.setattr(LiveDiagnosis, "update", update)
    judged(load(SCENARIOS / "s1-slow-gpu.toml"), 18.0)
    healthy = [few for few, slow_s in said if slow_s == 0]
    assert healthy[-1], "all was well"
    assert {few for few, slow_s in said if 0 < slow_s < watch.BRIEF_S} == {True}
    assert {few for few, slow_s in said if slow_s >= watch.BRIEF_S} == {False}


@pytest.mark.parametrize("name", ["s1-slow-gpu", "s2-slow-link"])
def test_a_slow_job_is_named_and_nothing_before(name: str) -> None:
    scenario = load(SCENARIOS / f"{name}.toml")
    found = accusations(judged(scenario, 18.0))
    assert found and found[0][0] > 0, "nobody is accused before anything is slow"
    verdict = found[-1][1]
    assert verdict.verdict_class in scenario.expect.verdicts
    assert {c.rank for c in verdict.culprits} == set(scenario.expect.ranks or scenario.expect.also)
    assert verdict.since is not None and verdict.time is not None and 3.0 < verdict.time - verdict.since < 20.0
    assert "instead of" in verdict.summary and verdict.evidence and verdict.next_steps
    if scenario.expect.link:
        assert verdict.link is not None and verdict.communicator is not None


@pytest.mark.parametrize(("name", "strength", "named"), [("s2-slow-link", 300.0, {0, 2}), ("s1-slow-gpu", 40.0, set())])
def test_one_iteration_is_enough_for_a_network_and_not_for_work(name: str, strength: float, named: set[int]) -> None:
    """Both make an iteration thirty times as long. A rank that works for so long, once, may write a checkpoint."""
    scenario = load(SCENARIOS / f"{name}.toml")
    scenario = replace(scenario, faults=tuple(replace(fault, strength=strength) for fault in scenario.faults))
    said = judged(scenario, 7.0)
    found = accusations(said)
    assert {culprit.rank for _, verdict in found for culprit in verdict.culprits} == named
    if named:
        time, verdict = found[0]
        assert time > 0 and "as none did before" in verdict.summary


def test_where_all_wait_for_data_alike_nobody_is_named_and_no_sample_counts() -> None:
    """While nothing is open on any rank, every rank seems at work: that is no straggler's doing."""
    scenario = load(SCENARIOS / "lookalike-data-loading.toml")
    weighed: list[set[Activity]] = []
    live = LiveDiagnosis()
    live.slow.observer = lambda job, looks, *_: weighed.extend(set(look.activities.values()) for look in looks)
    timeline = simulate(scenario)
    records = Observer(timeline, np.arange(0.7, timeline.end, 0.25).tolist()).until(timeline.end)
    done: defaultdict[str, int] = defaultdict(int)
    for round_ in rounds(records):
        latest = max(sample.time_ns for sample in round_)
        for host, events in records.calls.items():
            upto = int(np.searchsorted(events["time_ns"], latest, "right"))
            live.add_calls(events[done[host] : upto])
            done[host] = upto
        assert not live.update(round_).verdict_class.accuses
    assert weighed and {Activity.CALLS_NOTHING} not in weighed
    assert any(Activity.CALLS_NOTHING in does for does in weighed), "a rank that has called nothing while others have counts"


def test_more_samples_are_wanted_while_a_slow_job_has_no_culprit(monkeypatch: pytest.MonkeyPatch) -> None:
    lives: list[LiveDiagnosis] = []
    wanted: list[tuple[bool, bool]] = []

    class Noting(LiveDiagnosis):
        def update(self, samples: Sequence[ProcessSample]) -> Verdict:
            lives[:] = [self]
            verdict = super().update(samples)
            [(job, _)] = self.judged
            wanted.append((self.slow.searches(job, {}), verdict.verdict_class.accuses))
            return verdict

    monkeypatch.setitem(judged.__globals__, "LiveDiagnosis", Noting)
    said = judged(load(SCENARIOS / "s1-slow-gpu.toml"), 18.0)
    healthy = [more for (more, _), (time, _) in zip(wanted, said, strict=True) if time < 0]
    assert healthy and not any(healthy)
    assert any(more for more, _ in wanted) and not any(more for more, named in wanted if named)
    # A culprit that does not show is not looked for without end.
    [live] = lives
    [(job, _)] = live.judged
    watch = live.slow._watch_of(job)
    watch.standing = None
    assert live.slow.searches(job, {})
    # Samples that take as much of the CPUs as the job loses would keep it slow.
    lost, host = live.slow.pace(job)[1], job.members[0].info.host
    assert lost is not None and live.slow.searches(job, {host: 0.9 * lost}) and not live.slow.searches(job, {host: lost})
    watch.looks.extend([watch.looks[-1]] * SEARCHING_SAMPLES)
    assert not live.slow.searches(job, {})


def test_who_asks_about_a_slow_job_is_told_what_stands() -> None:
    assert accusations(judged(load(SCENARIOS / "s1-slow-gpu.toml"), 12.0, asked=True))


def test_a_slow_job_that_recovers_is_slow_no_longer() -> None:
    scenario = load(SCENARIOS / "s1-slow-gpu.toml")
    brief = replace(scenario, faults=tuple(replace(fault, duration_s=10.0) for fault in scenario.faults))
    said = judged(brief, 40.0)
    assert accusations(said)
    assert not said[-1][1].verdict_class.accuses


def test_a_slow_job_that_does_not_move_for_a_moment_stays_slow_until_it_hangs() -> None:
    scenario = load(SCENARIOS / "s1-slow-gpu.toml")
    said = judged(scenario, 18.0, stands_s=8)
    before, pause, hang = said[-9][1], [verdict for _, verdict in said[-8:-4]], said[-1][1]
    assert before.verdict_class is VerdictClass.SLOW_COMPUTATION
    assert [verdict.id for verdict in pause] == [before.id] * 4
    assert not hang.verdict_class.slow


def test_a_healthy_job_with_uneven_stages_is_silent() -> None:
    assert accusations(judged(load(SCENARIOS / "lookalike-uneven-stages.toml"), 60.0)) == []


def test_a_slow_host_is_named_as_one() -> None:
    scenario = load(SCENARIOS / "s1-background-computation.toml")
    verdict = accusations(judged(scenario, 18.0))[-1][1]
    assert {c.rank for c in verdict.culprits} == {0, 1, 2, 3}


def test_without_calls_nothing_is_said_of_a_job_without_a_past() -> None:
    """Without the calls plane there is no iteration time and nothing that proves ranks equal."""
    scenario = load(SCENARIOS / "clean-hosts-of-three-and-one.toml")
    assert accusations(judged(scenario, 20.0, planes=("state",))) == []


def test_a_harmless_slow_rank_is_not_blamed() -> None:
    """A rank of the stage that waits anyway has time to spare: half as slow again costs nothing."""
    scenario = load(SCENARIOS / "lookalike-uneven-stages.toml")
    slower = replace(scenario, faults=(Fault(FaultKind.SLOW_GPU, 3, start_s=5.0, strength=1.05),))
    assert [v for _, v in accusations(judged(slower, 30.0)) if v.verdict_class is VerdictClass.SLOW_COMPUTATION] == []
