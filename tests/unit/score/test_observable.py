"""What can be seen of a fault follows from its definition, the release, the nodes and when somebody attached."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ncclwatch.simulate.scenario import Scenario, load
from score.observable import why_hidden
from score.real import Attach

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


def on_nodes(name: str, ranks_per_node: int) -> Scenario:
    scenario = load(SCENARIOS / f"{name}.toml")
    return replace(scenario, layout=replace(scenario.layout, ranks_per_node=ranks_per_node))


@pytest.mark.parametrize(
    ("name", "ranks_per_node", "nccl", "attach", "hidden"),
    [
        ("quick-stop", 4, "2.21.5", Attach.POST_HANG, ""),
        ("quick-clean", 4, "2.21.5", Attach.LIVE, ""),
        ("quick-kill", 4, "2.32.3", Attach.LIVE, ""),
        ("quick-kill", 4, "2.32.3", Attach.POST_HANG, "memory does not show"),
        ("quick-gpu-stall", 4, "2.32.3", Attach.LIVE, "GPU memory"),
        ("quick-gpu-stall", 2, "2.32.3", Attach.LIVE, ""),
        ("quick-never-enters", 4, "2.21.5", Attach.LIVE, ""),
        ("quick-never-enters", 4, "2.21.5", Attach.POST_HANG, "2.26"),
        ("quick-never-enters", 4, "2.26.2", Attach.POST_HANG, ""),
        ("quick-never-enters", 2, "2.21.5", Attach.POST_HANG, ""),
        ("quick-never-enters-pipeline", 4, "2.32.3", Attach.POST_HANG, "Send and Recv"),
        ("quick-proxy-stall", 4, "2.32.3", Attach.LIVE, "no proxy"),
        ("quick-slow-loader", 4, "2.32.3", Attach.LIVE, ""),
        ("quick-slow-gpu", 4, "2.32.3", Attach.LIVE, "GPU memory"),
    ],
)
def test_why_a_fault_is_hidden(name: str, ranks_per_node: int, nccl: str, attach: Attach, hidden: str) -> None:
    found = why_hidden(on_nodes(name, ranks_per_node), nccl, attach)
    assert hidden in found and bool(hidden) == bool(found), found
