"""What the dashboard looks like, at three sizes, with a frozen clock: healthy, every class of verdict, 8 to 4,096 ranks, gaps."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, NicRecord, StepRate
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.view.frame import FlowRow, NicRow, View
from unit.screens import check_golden, screen
from unit.views import view

SIZES = ((80, 24), (120, 40), (200, 60))


@functools.cache
def big(ranks: int, kind: VerdictClass) -> View:
    return view(ranks, kind, samples=ranks <= 8)


@pytest.mark.parametrize("kind", list(VerdictClass))
def test_every_class_of_verdict(kind: VerdictClass) -> None:
    check_golden(f"class-{kind}-8-80x24", screen([view(8, kind)], (80, 24)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [1, 8, 512, 4096])
def test_jobs_of_every_size(ranks: int, size: tuple[int, int]) -> None:
    kind = VerdictClass.RUNNING if ranks == 1 else VerdictClass.STOPPED
    check_golden(f"ranks-{ranks}-{size[0]}x{size[1]}", screen([big(ranks, kind)], size))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("lost-records", view(8, VerdictClass.STOPPED, lost=1234)),
        ("no-calls-plane", view(8, VerdictClass.STOPPED, calls=False)),
        ("two-of-four-nodes", view(16, VerdictClass.NOT_ENTERED, world=32)),
        ("culprit-not-observed", view(16, VerdictClass.NOT_ENTERED, world=32, culprit=20)),
    ],
)
def test_what_is_missing_is_said(name: str, shown: View) -> None:
    check_golden(f"{name}-100x30", screen([shown], (100, 30)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "key"), [("grid", "2"), ("communicators", "3"), ("operations", "4"), ("delays", "7"), ("log", "8")]
)
def test_the_other_views(name: str, key: str, size: tuple[int, int]) -> None:
    check_golden(f"{name}-{size[0]}x{size[1]}", screen([view(64, VerdictClass.HARDWARE)], size, key))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("rank", ("enter",)),
        ("communicator", ("enter", "enter")),
        ("steps", ("enter", "enter", "enter")),
        ("verdict", ("v",)),
        ("help", ("question_mark",)),
    ],
)
def test_drill_down(name: str, keys: tuple[str, ...]) -> None:
    check_golden(f"page-{name}-80x24", screen([view(8, VerdictClass.STOPPED)], (80, 24), *keys))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_why(size: tuple[int, int]) -> None:
    """``v`` again goes down to the way to the verdict."""
    check_golden(f"page-why-{size[0]}x{size[1]}", screen([view(8, VerdictClass.HARDWARE)], size, "v", "v"))


def test_why_says_why_a_rule_is_true() -> None:
    """Rules of the pictures are made up, so that these stay as they are when a rule's derivation is worded otherwise."""
    shown = view(8, VerdictClass.STOPPED)
    assert "because: State T" in " ".join(screen([shown], (120, 40), "v", "v").split())


def test_v_goes_from_why_to_why_and_back_to_the_top() -> None:
    first, second = view(8, VerdictClass.HARDWARE), view(8, VerdictClass.STOPPED)
    both = View(replace(first.frame, verdicts=(*first.frame.verdicts, *second.frame.verdicts)))
    tops = [screen([both], (80, 10), *["v"] * times).splitlines()[1] for times in range(1, 5)]
    assert tops[0].startswith(" HARDWARE")
    assert [top.strip() for top in tops[1:3]] == ["WHY", "WHY"]
    assert tops[3] == tops[0]


def test_before_the_first_look() -> None:
    check_golden("attaching-80x24", screen([], (80, 24)))


def test_nothing_is_wider_or_higher_than_the_terminal() -> None:
    for columns, lines in ((40, 12), (80, 24), (61, 17), (300, 20)):
        shown = screen([view(512, VerdictClass.STOPPED, lost=10**9)], (columns, lines)).splitlines()
        assert len(shown) <= lines
        assert max(map(len, shown)) <= columns


def test_flows_and_nics() -> None:
    shown = with_network(view(8))
    check_golden("flows-120x40", screen([shown], (120, 40), "5"))
    check_golden("nics-120x40", screen([shown], (120, 40), "6"))
    check_golden("nics-80x24", screen([shown], (80, 24), "6"))


def with_network(base: View) -> View:
    nics = tuple(
        NicRow(
            NicRecord("node000", f"mlx5_{i}:1", "rdma", up=i != 2, state="ACTIVE" if i != 2 else "DOWN", rate_gbps=400.0,
                      receive_rate=2.1e10 if i != 2 else 0.0, send_rate=2.2e10 if i != 2 else 0.0,
                      errors={"symbol_error": 12} if i == 3 else {}, used_by=(i, i + 4)),
            tuple(float((j * (i + 1)) % 7) for j in range(30)),
        )
        for i in range(4)
    )  # fmt: skip
    flows = tuple(
        FlowRow(
            "node000",
            FlowRecord(1000 + i, FlowKind.RDMA, "IB", f"mlx5_{i % 4}", 1, FlowState.STALLED if i == 2 else FlowState.ACTIVE,
                       "3 requests in flight, no completion for 812 ms" if i == 2 else "", global_rank=i, rank=i, channel=0,
                       peer=(i + 1) % 8, direction=Direction.SEND, bandwidth=2.3e10 if i != 2 else None,
                       steps=StepRate(96, 512.0, 9, 10, 10.0), retries=i),
            tuple(float((j + i) % 5) for j in range(20)),
        )
        for i in range(8)
    )  # fmt: skip
    return View(replace(base.frame, nics=nics, flows=flows))
