"""Stacks of many ranks as one grid."""

from __future__ import annotations

from ncclwatch.model.doing import Doing
from ncclwatch.text import Style
from ncclwatch.view.stack_grid import RankStack, grid_lines, groups, odd

PLAIN = Style(enabled=False)


def _rank(rank: int, doing: Doing = Doing.IN_NCCL, frames: tuple[str, ...] = ("all_reduce",), **more: object) -> RankStack:
    return RankStack(rank, "node1", 100 + rank, (doing,), frames, "main thread sleeping", 1000.0, **more)  # type: ignore[arg-type]


LATE = _rank(2, Doing.DATA_LOADER, ("_next_data", "train"))


def test_the_odd_one_out_stands_out() -> None:
    found = [_rank(0), _rank(1), LATE, _rank(3)]
    assert odd(found) == [LATE]
    text = "\n".join(grid_lines(found, PLAIN, now=1001.0))
    assert "elsewhere than most: rank 2 (read 1.0s to 1.0s ago)" in text
    assert "  stack  A A B A" in text
    assert "A  ranks 0-1, 3: is in a call to NCCL" in text
    assert "B  rank 2 (node1, pid 102): waits for its data loader" in text


def test_without_a_majority_nobody_is_odd() -> None:
    assert odd([_rank(0), LATE]) == []
    assert odd([_rank(0), LATE, _rank(3), _rank(4, frames=("x",))]) == []
    assert odd([]) == []


def test_stacks_are_equal_by_frames_and_without_any_by_the_kernel() -> None:
    assert len(groups([_rank(0), _rank(1, seconds=3.0, problem="")])) == 1
    blind = [RankStack(n, "node1", n, (Doing.UNKNOWN,), (), kernel, 0.0) for n, kernel in enumerate(["a", "a", "b"])]
    assert [one.rank for one in odd(blind)] == [2]


def test_what_comes_from_a_process_is_cleaned_and_many_groups_are_bounded() -> None:
    found = [_rank(n, frames=(f"f{n}\x1b[2J",)) for n in range(100)]
    lines = list(grid_lines(found, PLAIN, now=1000.0))
    assert all(line.isprintable() for line in lines)
    assert any("more stacks" in line for line in lines)
    assert list(grid_lines([], PLAIN)) == ["0 processes, 0 stacks (none read)"]
