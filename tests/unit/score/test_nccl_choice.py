"""What is drawn of NCCL's own choices: the same for a seed, with the fault at a rank that it can strike."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclwatch.simulate.layout import groups
from ncclwatch.simulate.scenario import Scenario, ScoreClass, load
from score.nccl_choice import DRAWN_SIZES, LARGEST_ACTIVATIONS, PLAYED, RELEASES, by_name, cast, draw, moved

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
            assert nccl in RELEASES and small <= min(large, LARGEST_ACTIVATIONS) and {small, large} <= set(DRAWN_SIZES)
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
