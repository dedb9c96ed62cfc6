"""Real runs, but for the running: what is played and what not, how tries vary, and what is scored of a recording."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.simulate.scenario import Layout, Scenario, ScoreClass, load_all
from ncclwatch.simulate.testbed import plan
from score import matrix
from score.__main__ import SCENARIOS
from score.diagnosers import Ncclwatch
from score.real import Attach, Outcome, Recording, Roster, Run, Transport, _score, as_played, obstacle, vary
from score.scoring import Result
from score.table import REAL
from unit.synthetic import SECOND, Rank, communicator, frozen_ring

CATALOGUE = {scenario.name: scenario for scenario in load_all(SCENARIOS)}


def result(name: str, *, right: bool, said: str = "stopped") -> Result:
    return Result(
        name, "H1", "ncclwatch", bool(said), right, right, None, None, False, 1.0 if said else None, 1.0, said, [1], "s",
        "2.27.5 socket live seed 1 try 0",
    )  # fmt: skip


def test_most_of_the_catalogue_is_played_and_the_rest_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "available", lambda version: True)  # whether NCCL was downloaded here does not matter
    runs, left_out = matrix.choose(
        CATALOGUE.values(), versions=[], transports=[Transport.SOCKET], attaches=tuple(Attach), tries=1, seed=1, after_s=1.0
    )
    played = {run.scenario.name for run in runs}
    assert len(played) > 60
    reasons = {name.split()[0]: reason for name, reason in left_out.items()}
    assert "simulation only" in reasons["scale-h1-stop-4096"]
    assert "NVLink" in reasons["h1-never-enters-nvlink"]
    assert "Tree" in reasons["clean-tree"]
    assert "simulation only" in reasons["clean-bad-records"]
    assert not played & reasons.keys()


def test_releases_by_turns_take_each_scenario_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "available", lambda version: True)
    chosen = [CATALOGUE[name] for name in ("quick-stop", "scale-h1-stop-4096", "quick-kill", "quick-skip", "quick-clean")]
    runs, _ = matrix.choose(
        chosen, versions=["2.25.1", "2.27.5", "2.29.2"], transports=[], attaches=(Attach.LIVE,), tries=1, seed=1, after_s=1.0,
        in_turn=True,
    )  # fmt: skip
    # What cannot be played takes no turn.
    assert [(run.scenario.name, run.nccl) for run in runs] == [
        ("quick-stop", "2.25.1"), ("quick-kill", "2.27.5"), ("quick-skip", "2.29.2"), ("quick-clean", "2.25.1")
    ]  # fmt: skip


def test_a_proxy_fault_is_not_played_where_no_proxy_works() -> None:
    scenario = CATALOGUE["quick-proxy-stall"]
    assert obstacle(scenario, "2.27.5", Transport.SOCKET) == ""
    one_host = vary(scenario, 1, 0)
    assert "proxy" in obstacle(_on_one_host(one_host), "2.27.5", Transport.SHM)


def _on_one_host(scenario: Scenario) -> Scenario:
    return replace(scenario, layout=replace(scenario.layout, ranks_per_node=4))


def test_a_link_fault_is_played_on_the_link_of_the_ranks_host_and_its_ends_may_be_named() -> None:
    played = as_played(CATALOGUE["s2-slow-link"], "2.27.5", Transport.SOCKET)
    made = plan(played, links=True)
    assert made.unsupported == ()
    assert [(action.what, action.ranks, action.share) for action in made.actions] == [("link-limit", (0,), 0.05)]
    # It is slow with everybody, so its rank must be named.
    assert played.expect.ranks == (0,) and played.expect.link == ()
    assert {1, 2, 6, 8} <= set(played.expect.also) and 15 not in played.expect.also
    assert as_played(CATALOGUE["s2-background-traffic"], "2.27.5", Transport.SOCKET).expect.ranks == (8,)
    both = as_played(CATALOGUE["s3-one-bad-host"], "2.27.5", Transport.SOCKET).expect
    assert both.ranks == (4, 5, 6, 7) and not set(both.ranks) & set(both.also)
    # Over shared memory all of a host share its port; where one ring leaves it at one rank, that link says it.
    shared = as_played(CATALOGUE["s2-background-traffic"], "2.27.5", Transport.SHM).expect
    assert shared.ranks == (8, 9, 10, 11)
    ring = replace(CATALOGUE["s2-background-traffic"], layout=Layout(dp=16, ranks_per_node=4))
    alone = as_played(ring, "2.27.5", Transport.SHM).expect
    assert alone.ranks == () and set(alone.also) == {7, 8, 9, 10, 11, 12}
    down = as_played(CATALOGUE["quick-link-down"], "2.27.5", Transport.SOCKET).expect
    assert down.ranks == (CATALOGUE["quick-link-down"].faults[0].rank,) and down.also and down.link == ()


def test_tries_vary_by_their_number_and_the_seed_and_the_first_is_the_file() -> None:
    scenario = CATALOGUE["quick-stop"]
    assert vary(scenario, 1, 0) is scenario
    later = [vary(scenario, 1, number) for number in range(1, 9)]
    assert later == [vary(scenario, 1, number) for number in range(1, 9)]
    assert later != [vary(scenario, 2, number) for number in range(1, 9)]
    for other in later:
        assert other.expect.ranks == (other.faults[0].rank,)
    assert len({other.faults[0].rank for other in later}) > 1
    assert len({other.faults[0].start_s for other in later}) == len(later)


def test_a_slow_rank_is_another_one_in_each_try() -> None:
    for name in ("gpu", "cpu-limit", "loader", "proxy-sleeps", "garbage-collection"):
        tries = [vary(CATALOGUE[f"quick-slow-{name}"], 1, number) for number in range(20)]
        assert {other.faults[0].rank for other in tries} == {0, 1, 2, 3}
        assert all(other.expect.ranks == (other.faults[0].rank,) for other in tries)
    part_of_a_host = CATALOGUE["s3-one-bad-host"]
    assert vary(part_of_a_host, 1, 3).expect == part_of_a_host.expect


def test_two_ranks_that_are_stopped_stay_two() -> None:
    for number in range(1, 20):
        other = vary(CATALOGUE["quick-two-stopped"], 3, number)
        assert len(set(other.expect.ranks)) == 2
        assert set(other.expect.ranks) == {fault.rank for fault in other.faults}


def recording(ranks: list[Rank], count: int = 4) -> Recording:
    rounds = zip(*(rank.looks(count) for rank in ranks), strict=True)
    batches = []
    for number, samples in enumerate(rounds):
        time_ns = samples[0].time_ns
        batch = NodeBatch(
            host="node",
            boot_id="boot",
            sequence=number,
            time_ns=time_ns,
            wall_ns=samples[0].wall_ns,
            looked=True,
            samples=samples,
        )
        batches.append(batch)
    return Recording(batches)


def test_a_recording_is_judged_look_by_look_and_baselines_get_the_same_records() -> None:
    scenario = CATALOGUE["quick-stop"]
    kept = recording(frozen_ring(3))
    first = kept.batches[0].time_ns / SECOND
    [ours] = _score(scenario, kept, first, "2.27.5 socket live seed 1 try 0", ())
    assert ours.right and ours.said == VerdictClass.STOPPED and ours.named == [3]
    assert ours.detection_s is not None and 0 <= ours.detection_s <= 2
    records = kept.records(first + 1.5)
    assert [len(series) for series in records.samples] == [2] * 4
    assert records.timings == {} and records.calls == {}
    assert Ncclwatch().diagnose(records, first + 1.5)[0].verdict_class is VerdictClass.STOPPED
    [early] = _score(scenario, kept, first + 100, "2.27.5 socket live seed 1 try 0", ())
    assert early.false_alarm and not early.right, "said before the fault began"


def test_ranks_of_a_communicator_are_found_from_those_that_were_seen() -> None:
    scenario = CATALOGUE["quick-stop"]  # tensor groups 0 1, 2 3; data groups 0 2, 1 3
    world = communicator(0, 4)
    roster = Roster(scenario, recording([Rank(0, 4, (world,)), Rank(1, 4, (communicator(1, 4),))]))
    assert roster.members_of(f"{world.hash:016x}") == (0, 1, 2, 3)
    assert roster.members_of("0") == ()
    pair = communicator(0, 2, comm_hash=0xC1)
    assert Roster(scenario, recording([Rank(0, 4, (pair,))])).members_of(f"{0xC1:016x}") == (), "two groups fit"


def test_the_report_says_what_was_real_and_what_was_not_right(tmp_path: Path) -> None:
    run = Run(CATALOGUE["quick-stop"], "2.27.5", Transport.SOCKET)
    good, bad = result("quick-stop", right=True), result("quick-kill", right=False, said="")
    outcomes = [Outcome(run, [good]), Outcome(run, [bad], "the job did not come to stand")]
    text = matrix.report(outcomes, {"clean-tree (2.27.5, socket)": "Tree/Simple"}, [Ncclwatch()], markdown=True)
    assert REAL in text and "SIMULATED" not in text
    assert "quick-kill [2.27.5 socket live seed 1 try 0]: said nothing" in text
    assert "the job did not come to stand" in text and "clean-tree (2.27.5, socket): Tree/Simple" in text
    data = matrix.as_json(outcomes, {}, [Ncclwatch()])
    assert data["source"] == "real NCCL on the CPU testbed"
    assert [r["setting"] for r in data["results"]] == [good.setting, bad.setting]
    kept = recording(frozen_ring(3))
    kept.save(tmp_path / "r.ncclwatch")
    assert (tmp_path / "r.ncclwatch").stat().st_size > 0


@pytest.mark.parametrize("score_class", list(ScoreClass))
def test_every_class_can_be_played_for_real(score_class: ScoreClass) -> None:
    played = [
        s for s in CATALOGUE.values() if s.expect.score_class is score_class and not obstacle(s, "2.27.5", Transport.SOCKET)
    ]
    assert len(played) >= 2
