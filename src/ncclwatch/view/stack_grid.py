"""Stacks of many ranks as one grid: equal ones share a letter, and the odd ones stand out (Mycroft, 6.2)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ncclwatch.model.doing import Doing
from ncclwatch.text import Style, clean, duration, ranges

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PER_LINE = 32
FRAMES_SHOWN, GROUPS_SHOWN = 12, 12


@dataclass(frozen=True, slots=True)
class RankStack:
    """One rank's stack: ``frames`` are those of its main thread as text, the innermost first, and ``kernel`` what the kernel says
    of that thread; ``doing``: what it does, most telling first. ``time``: when it was read, seconds since the epoch.
    """

    rank: int | None
    host: str
    pid: int
    doing: tuple[Doing, ...]
    frames: tuple[str, ...]
    kernel: str
    time: float
    problem: str = ""
    holder: tuple[str, ...] = ()
    """Frames of the thread that holds the GIL, where that is another one."""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[object, ...]:
        """What equal stacks have in common: with frames these, without what the kernel says."""
        return (self.doing, self.frames, self.holder) if self.frames else (self.doing, self.kernel, self.problem)

    @property
    def name(self) -> str:
        """``rank 2``, or ``pid 4711`` where the rank is not known."""
        return f"pid {self.pid}" if self.rank is None else f"rank {self.rank}"


def groups(found: Sequence[RankStack]) -> list[list[RankStack]]:
    """Ranks with equal stacks together, the largest group first."""
    by_key: dict[tuple[object, ...], list[RankStack]] = {}
    for one in found:
        by_key.setdefault(one.key, []).append(one)
    return sorted(by_key.values(), key=lambda group: -len(group))


def odd(found: Sequence[RankStack]) -> list[RankStack]:
    """Those that stand elsewhere than most: of fewer than three, or where no stack is of more than half, nobody."""
    parts = groups(found)
    most = len(parts[0]) if parts else 0
    return [one for group in parts[1:] for one in group] if len(found) >= 3 and 2 * most > len(found) else []


def grid_lines(found: Sequence[RankStack], style: Style, now: float | None = None) -> Iterator[str]:
    """The grid, then each group with what it does and where it stands."""
    parts, now = groups(found), time.time() if now is None else now
    letter = {id(one): LETTERS[min(at, 25)] for at, group in enumerate(parts) for one in group}
    outside = odd(found)
    names = ", ".join(one.name for one in outside[:8]) + (f" and {len(outside) - 8} more" if len(outside) > 8 else "")
    ages = [max(now - one.time, 0.0) for one in found]
    read = f"read {duration(min(ages))} to {duration(max(ages))} ago" if ages else "none read"
    s = "s" if len(parts) != 1 else ""
    elsewhere = f"; elsewhere than most: {style.bad(names)}" if names else ""
    yield f"{len(found)} process{'es' if len(found) != 1 else ''}, {len(parts)} stack{s}{elsewhere} ({read})"
    ordered = sorted(found, key=lambda one: (one.rank is None, one.rank or 0, one.host, one.pid))
    for at in range(0, len(ordered), PER_LINE):
        row = ordered[at : at + PER_LINE]
        cells = [max(len(_number(one)), 1) for one in row]
        yield "  rank   " + " ".join(_number(one).rjust(width) for one, width in zip(row, cells, strict=True))
        yield "  stack  " + " ".join(
            (style.bad if one in outside else str)(letter[id(one)].rjust(width)) for one, width in zip(row, cells, strict=True)
        )
    for at, group in enumerate(parts[:GROUPS_SHOWN]):
        yield from _group_lines(LETTERS[min(at, 25)], group, style)
    if len(parts) > GROUPS_SHOWN:
        yield f"… and {len(parts) - GROUPS_SHOWN} more stacks (all of them with --json)"


def _number(one: RankStack) -> str:
    return "?" if one.rank is None else str(one.rank)


def _group_lines(letter: str, group: Sequence[RankStack], style: Style) -> Iterator[str]:
    first = group[0]
    known = [one.rank for one in group if one.rank is not None]
    who = (
        f"rank{'s' if len(known) != 1 else ''} {ranges(known)}"
        if len(known) == len(group)
        else f"{len(group)} process{'es' if len(group) != 1 else ''}"
    )
    who += f" ({clean(first.host, 64)}, pid {first.pid})" if len(group) == 1 else ""
    what = "; ".join(doing.words for doing in first.doing) or Doing.UNKNOWN.words
    yield ""
    yield f"{style.bold(letter)}  {who}: {what}"
    if first.problem:
        yield f"   {style.dim(clean(first.problem, 200))}"
    for frame in first.frames[:FRAMES_SHOWN]:
        yield f"   {clean(frame, 200)}"
    if len(first.frames) > FRAMES_SHOWN:
        yield f"   … {len(first.frames) - FRAMES_SHOWN} more frames"
    if first.kernel:
        yield f"   kernel: {clean(first.kernel, 200)}"
    if first.holder:
        yield "   the GIL is held by a thread in"
        yield from (f"     {clean(frame, 200)}" for frame in first.holder[:FRAMES_SHOWN])
