"""Ranks in the titles of processes."""

from __future__ import annotations

import pytest

from ncclwatch.target.titles import rank_of_title


@pytest.mark.parametrize(
    ("title", "rank"),
    [
        ("VLLM::Worker_TP3", 3),
        ("VLLM::Worker_TP1_EP1", 1),
        ("VLLM::Worker_PP1", 1),
        ("sglang::scheduler_TP0", 0),
        ("sglang::scheduler_TP12", 12),
        ("ray::Trainer_rank_3.train", 3),
        ("ray::Worker(rank=11).step()", 11),
        ("ray::RANK2.run", 2),
    ],
)
def test_one_place_is_the_rank(title: str, rank: int) -> None:
    assert rank_of_title((title,)) == rank


@pytest.mark.parametrize(
    "title",
    [
        "",
        "VLLM::EngineCore_DP1",
        "VLLM::Worker",
        "VLLM::Worker_PP0_TP1",
        "VLLM::Worker_DP0_TP1_EP1",
        "VLLM::Worker_DP1_EP1",
        "sglang::scheduler",
        "sglang::scheduler_DP1_TP0",
        "sglang::detokenizer",
        "ray::RayWorkerWrapper.execute_method",
        "ray::IDLE",
        "ray::Ranker.step",
        "ray::rank_" + "9" * 40,
        "python train.py --rank 3",
        "my VLLM::Worker_TP3",
    ],
)
def test_what_needs_sizes_or_says_nothing_is_no_rank(title: str) -> None:
    """Where a title gives places in several groups, their sizes are missing: the communicator then tells the rank."""
    assert rank_of_title((title,)) is None


def test_no_command_has_no_rank() -> None:
    assert rank_of_title(()) is None
