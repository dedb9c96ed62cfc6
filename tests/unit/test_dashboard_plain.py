"""The plain live view at 80 and 120 columns, with a frozen clock: everything fits, what is urgent is on the screen."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from ncclwatch.collect.batch import Overhead, PlaneState
from ncclwatch.collect.windows import CurrentOperation, LastCall, RankWindow
from ncclwatch.dashboard import rows
from ncclwatch.dashboard.plain import footer, screen
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from unit.synthetic import WORLD, process


def window(rank: int, *, world: int = 4, run_state: str = "S", done: int = 92, **more: object) -> RankWindow:
    operation = CurrentOperation(
        "AllReduce", "state", WORLD << 40, rank, world, 1124, 12.3, False, count=1 << 20, nbytes=4 << 20,
        protocol="Simple", algorithm="Ring", steps_done=done, steps_total=96,
    )  # fmt: skip
    plain = RankWindow(
        time_ns=0, process=process(rank, world, host="node0"), rank=rank, gpu=rank, run_state=run_state, operation=operation,
        last_call=LastCall("AllReduce", WORLD, 12.3, 1 << 20, 4 << 20), calls=9, operations=9, operations_per_s=0.0,
        rate_plane="calls", bytes_per_s=1.25e9, steps_per_s=0.0, still_s=12.3,
    )  # fmt: skip
    return replace(plain, **more)  # type: ignore[arg-type]


STOPPED = Verdict(
    VerdictClass.STOPPED,
    "rank 2 (node0, pid 1002, GPU 2) holds up the job in AllReduce #1124: its process is stopped by a signal",
    culprits=(Culprit(2, 2, "node0", 1002, 2, reason="its process is stopped by a signal"),),
    victims=(0, 1, 3),
    confidence=0.99,
    evidence=tuple(f"evidence {n} " + "x" * 100 for n in range(9)),
    next_steps=("find out who stopped it",),
)
FOOT = footer([PlaneState("state", True), PlaneState("calls", True)], 3, Overhead(812.0, 0.00043, 0.0021, 93 << 20))


def shown(windows: Sequence[RankWindow], verdict: Verdict | None, width: int, height: int) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=False, highlight=False, legacy_windows=False)
    console.print(screen(windows, verdict, width=width, height=height, news=["exited: pid 7"], footer=FOOT))
    return out.getvalue().rstrip("\n").splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 50)])
@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.parametrize("verdict", [None, STOPPED])
def test_everything_fits_the_terminal(width: int, height: int, ranks: int, verdict: Verdict | None) -> None:
    lines = shown([window(rank, world=ranks) for rank in range(ranks)], verdict, width, height)
    assert len(lines) < height
    assert max(map(len, lines)) <= width


def test_the_golden_view_at_80_columns() -> None:
    windows = [window(rank, run_state="T" if rank == 2 else "S", done=92 - 20 * (rank == 3)) for rank in range(4)]
    assert [line.rstrip() for line in shown(windows, STOPPED, 80, 24)] == [
        "ncclwatch  node0  4 ranks  NCCL 2.27.5                               Ctrl-C ends",
        " STOPPED  rank 2 (node0, pid 1002, GPU 2) holds up the job in AllReduce #1124:",
        "its process is stopped by a signal  99%",
        "▶ rank 2  host node0  pid 1002  GPU 2",
        "  evidence 0 " + "x" * 66 + "…",
        "  evidence 1 " + "x" * 66 + "…",
        "  evidence 2 " + "x" * 66 + "…",
        "  do: find out who stopped it",
        "RANK     PID GPU STATE    OPERATION            AGE  OPS/S   DATA/S       STEPS",
        "   0    1000   0 waiting  AllReduce #1124      12s      0  1.2 GiB       92/96",
        "   1    1001   1 waiting  AllReduce #1124      12s      0  1.2 GiB       92/96",
        "   2    1002   2 STOPPED  AllReduce #1124      12s      0  1.2 GiB       92/96",
        "   3    1003   3 waiting  AllReduce #1124      12s      0  1.2 GiB       72/96",
        "exited: pid 7",
        "planes: state, calls; 3 call records lost",
        "cost: probes 812 hits/s = 0.043% of a core, ncclwatch 0.2% of a core, 93 MiB",
    ]


def test_wider_terminals_show_more_columns() -> None:
    [line] = [line for line in shown([window(0)], None, 130, 40) if "AllReduce" in line]
    assert line.split() == [
        "0", "1000", "0", "running", "AllReduce", "#1124", "0000a100", "4", "MiB", "12s", "0", "1.2", "GiB", "92/96",
        "█████████░", "Ring/Simple",
    ]  # fmt: skip


def test_when_not_all_fit_the_urgent_ones_are_shown() -> None:
    windows = [window(rank, world=64, still_s=0.0) for rank in range(64)]
    windows[50] = window(50, world=64, run_state="T", still_s=0.0)
    windows[60] = window(60, world=64, still_s=99.0)
    culprit = replace(STOPPED, culprits=(Culprit(63, 63, "node0", 1063, 7),))
    lines = shown(windows, culprit, 80, 24)
    ranks = [int(line.split()[0]) for line in lines if "AllReduce #1124 " in line and not line.startswith((" STOPPED", "its"))]
    assert {50, 60, 63} <= set(ranks)
    assert ranks == sorted(ranks)
    assert any(f"{64 - len(ranks)} more ranks" in line for line in lines)


def test_cells_of_a_rank_of_which_little_is_known() -> None:
    blank = window(0, gpu=None, operation=None, last_call=None, operations_per_s=None, bytes_per_s=None, run_state="?")
    blank = replace(blank, rank=None)
    assert rows.cells(blank, rows.visible(80)) == ["?", "1000", "-", "?", "-", "", "-", "-", ""]


def test_an_idle_rank_shows_its_last_call_and_a_blocked_one_its_call() -> None:
    idle = window(0, operation=None)
    assert rows.operation_text(idle) == "(AllReduce)"
    blocked = CurrentOperation("CommSplit", "calls", 1, 0, 4, None, 31.0, False, blocked_call=True)
    assert rows.operation_text(window(0, operation=blocked)) == "in CommSplit"
    assert rows.age(window(0, operation=replace(blocked, at_least=True))) == ">31s"


def test_a_failed_look_shows() -> None:
    assert rows.state(window(0, problem="not now")) == "no read"


def test_a_bar_is_full_only_when_all_is_done() -> None:
    assert rows.bar(95, 96) == "█" * 9 + "░"
    assert rows.bar(96, 96) == "█" * 10
    assert rows.bar(500, 96) == "█" * 10
    assert rows.bar(-5, 0) == "░" * 10


def test_names_from_a_target_cannot_move_the_cursor() -> None:
    evil = "\x1b[2J\x1b]0;x\x07\r"
    bad = window(0, process=replace(process(0, 4, host=evil), name=evil))
    bad = replace(bad, operation=replace(bad.operation, name=evil, protocol=evil) if bad.operation else None)
    verdict = replace(STOPPED, summary=evil, evidence=(evil,), culprits=(Culprit(0, 0, evil, 1, 1, reason=evil),))
    for line in shown([bad], verdict, 130, 30):
        assert line.isprintable()


def test_the_footer_says_why_there_are_no_calls() -> None:
    assert (
        footer([PlaneState("state", True), PlaneState("calls", False, "CAP_SYS_ADMIN is missing")], 0, None)
        == "planes: state; no calls: CAP_SYS_ADMIN is missing"
    )
