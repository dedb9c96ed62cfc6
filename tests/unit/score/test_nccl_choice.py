"""What is drawn of NCCL's own choices: the same for a seed, with the fault at a rank that it can strike."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.simulate.layout import groups
from ncclwatch.simulate.scenario import Scenario, ScoreClass, load
from score.nccl_choice import (
    DRAWN_SIZES,
    LARGEST_ACTIVATIONS,
    PLAYED,
    RELEASES,
    TENSOR_SIZES,
    Judged,
    by_name,
    cast,
    draw,
    judge,
    moved,
    tables,
    widened,
)
from score.real import Attach, OwnLines, Recording, Run, Transport

FOLDER = Path(__file__).resolve().parent.parent.parent / "scenarios"


@pytest.fixture(scope="module")
def quick() -> list[Scenario]:
    return [load(FOLDER / f"{name}.toml") for name in PLAYED]


def test_a_seed_draws_the_same_and_another_seed_other_jobs(quick: list[Scenario]) -> None:
    first = draw(quick, RELEASES, 1)
    assert first == draw(quick, RELEASES, 1)
    assert first != draw(quick, RELEASES, 2) and len(first) == len(draw(quick, RELEASES, 2))


def test_what_is_drawn_can_be_played_and_is_found_again_by_its_name(quick: list[Scenario]) -> None:
    known = {scenario.name: scenario for scenario in quick}
    for seed in range(20):
        cells = draw(quick, RELEASES, seed)
        made = [cast(scenario, ranks_per_node, nbytes, nccl) for scenario, nccl, ranks_per_node, nbytes in cells]
        assert len({played.name for played in made}) == len(made)
        assert made == [by_name(played.name, nccl, known) for played, (_, nccl, _, _) in zip(made, cells, strict=True)]
        for scenario, nccl, _, (small, large) in cells:
            assert nccl in RELEASES and small <= large
            if scenario.layout.tp == 4:
                assert small == large and small in TENSOR_SIZES
            else:
                assert small <= LARGEST_ACTIVATIONS and {small, large} <= set(DRAWN_SIZES)
            assert scenario.expect.score_class is not ScoreClass.INIT_HANG or 0 not in scenario.expect.ranks
    assert by_name("quick-stop", "2.27.5", known) is None and by_name("nowhere-2-a-node-8-8", "2.27.5", known) is None


def test_the_fault_moves_within_the_kind_of_its_group(quick: list[Scenario]) -> None:
    """Whoever is expected beside the rank with the fault stays beside it, in a group of the same role."""
    stall = next(one for one in quick if one.name == "quick-other-operation")
    for by in range(4):
        there = moved(stall, by)
        (rank,), (also,) = there.expect.ranks, there.expect.also
        assert there.faults[0].rank == rank == 3 ^ by
        assert any({rank, also} <= set(group) for group in groups(there.layout, "tp").tolist())


def test_each_but_the_pipeline_is_drawn_in_a_tensor_group_of_four_on_both_kinds_of_nodes(quick: list[Scenario]) -> None:
    cells = {
        (scenario.name.partition("+")[0], nodes) for scenario, _, nodes, _ in draw(quick, RELEASES, 1) if scenario.layout.tp == 4
    }
    inside_alone = {"quick-proxy-stall"}
    assert cells == {
        (name, nodes)
        for name in set(PLAYED) - {"quick-never-enters-pipeline"}
        for nodes in (2, 4)
        if not (name in inside_alone and nodes == 4)
    }


def test_in_a_group_of_four_the_fault_strikes_there_and_one_rank_is_odd(quick: list[Scenario]) -> None:
    known = {scenario.name: scenario for scenario in quick}
    skipped = widened(known["quick-skip"], "tp")
    assert (skipped.layout.tp, skipped.layout.dp, skipped.faults[0].role) == (4, 1, "tp")
    assert widened(known["quick-stop"], "dp").faults[0].role == "", "what has no call strikes at its moment"
    assert widened(known["quick-other-operation"], "dp").expect.also == ()
    assert widened(known["quick-skip"], "") == known["quick-skip"]


def test_a_proxy_that_stalls_may_be_named_with_the_other_ends_of_its_links(quick: list[Scenario]) -> None:
    stall = next(one for one in quick if one.name == "quick-proxy-stall")
    assert cast(stall, 2, (8, 8), "2.27.5").expect.also == (0, 3)
    assert cast(widened(stall, "tp"), 2, (8, 8), "2.27.5").expect.also == (0, 2, 3)


def test_what_slows_a_job_by_less_than_other_work_on_the_machine_does_is_hidden(quick: list[Scenario]) -> None:
    """The rule is score.visible's: iterations of 1 s, and then of 1.05 s or of 3 s."""
    slow = cast(next(one for one in quick if one.name == "quick-slow-loader"), 2, (8, 8), "2.27.5")
    run = Run(slow, "2.27.5", Transport.P2P, (Attach.LIVE,))
    for after, hidden in ((1.05, "does not show"), (3.0, "")):
        ends = [(after, 30 + after * step) for step in range(1, 6)]
        lines = [(1.0 + step % 7 / 20, float(step)) for step in range(1, 31)] + ends
        batch = NodeBatch(host="host", boot_id="boot", sequence=0, time_ns=int(ends[-1][1] * 1e9), wall_ns=0, looked=True)
        said = judge(slow, Recording([batch], OwnLines(tuple(lines))), 30.0, run, Attach.LIVE, (8, 8), "")
        assert hidden in said.hidden and bool(hidden) == bool(said.hidden), said.hidden


def test_a_fault_that_nobody_waits_for_is_hidden(quick: list[Scenario]) -> None:
    """The job has done every iteration; one less, and somebody waits."""
    stall = cast(widened(next(one for one in quick if one.name == "quick-proxy-stall"), "tp"), 2, (8, 8), "2.27.5")
    run = Run(stall, "2.27.5", Transport.P2P, (Attach.LIVE,))
    for done, hidden in ((stall.workload.iterations, "held up nobody"), (stall.workload.iterations - 1, "")):
        lines = OwnLines(tuple((1.0, float(step)) for step in range(1, done + 1)))
        said = judge(stall, Recording([], lines), 30.0, run, Attach.LIVE, (8, 8), "")
        assert hidden in said.hidden and bool(hidden) == bool(said.hidden), said.hidden


def test_a_job_counts_in_the_row_of_each_pair_that_it_used() -> None:
    one = Judged(
        scenario="quick-stop+tp-2-a-node-8-8", nccl="2.27.5", ranks_per_node=2, nbytes=(8, 8), attach="live",
        chosen=("AllReduce Ring/LL", "AllReduce Tree/LL"), score_class="H1", hidden="", right=True, said="stopped", named=(3,),
        innocents=(), last="stopped", summary="",
    )  # fmt: skip
    said = tables([one])
    assert [line.split("|")[2].strip() for line in said.splitlines() if line.startswith("| two nodes")] == ["Ring/LL", "Tree/LL"]
    assert "| all " in said and "1/1" in said.split("| all ")[1]
    assert "Never chosen: Ring/LL128, Ring/Simple, Tree/LL128, Tree/Simple" in said
