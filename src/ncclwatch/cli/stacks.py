"""``ncclwatch stacks``: where ranks stand, as one grid with the odd ones out; and the same beside a verdict."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from ncclwatch.cli import options
from ncclwatch.cli.options import AllOption, AllowPauseOption, JsonOption, PidOption
from ncclwatch.cli.output import emit, emit_json
from ncclwatch.knowledge.doing import doings
from ncclwatch.knowledge.match import with_looked
from ncclwatch.model.doing import Doing
from ncclwatch.model.verdict import Culprit, Verdict
from ncclwatch.target.stacks import ProcessStack, read_stacks
from ncclwatch.text import Style, clean, duration, wrap
from ncclwatch.view.stack_grid import RankStack, grid_lines, odd

SUSPECTS, PEERS = 4, 3
"""Of a verdict so many culprits and so many of those that wait are looked at."""
BESIDE_S = 12.0
"""For all that is read beside a verdict."""


def stacks(
    words: Annotated[list[str] | None, typer.Argument(metavar="[PID]...", help="More pids.")] = None,
    pid: PidOption = None,
    every: AllOption = False,
    allow_pause: AllowPauseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show where ranks stand: state, Python frames, kernel functions; equal stacks share a letter, the odd ones stand out.

    Nothing is stopped, unless --allow-pause is given. Python frames need py-spy (pip install 'ncclwatch[stacks]').
    """
    from ncclwatch.errors import NcclwatchError
    from ncclwatch.target.discover import inspect_process

    named = options.only_pids(pid, words, "stacks are of live processes: give pids")
    ranks: dict[int, int | None] = {}
    for number in options.choose_pids(named, every):
        try:
            ranks[number] = inspect_process(number).rank
        except NcclwatchError:
            # Whatever it is, where it stands can be shown.
            ranks[number] = None
    host = socket.gethostname()
    found = [shown(one, ranks[one.pid], host) for one in read_stacks(ranks, pause=allow_pause)]
    if as_json:
        emit_json([plain_stack(one, found) for one in found])
        return
    for line in grid_lines(found, Style()):
        emit("\n".join(wrap(line, shutil.get_terminal_size().columns)) if sys.stdout.isatty() else line)


def shown(stack: ProcessStack, rank: int | None, host: str) -> RankStack:
    """A process's stack as the grid shows it."""
    frames = tuple(frame.text for frame in stack.main.frames) if stack.main is not None else ()
    found = doings(stack.state, [row.state for row in stack.rows], stack.frames, gil_held=stack.gil_held)
    holder = tuple(frame.text for frame in stack.holder.frames) if stack.gil_held and stack.holder is not None else ()
    problem = stack.problem or stack.python.problem
    return RankStack(rank, host, stack.pid, found, frames, _kernel(stack), stack.time, problem, holder, stack.python.seconds)


def _kernel(stack: ProcessStack) -> str:
    """``main thread sleeping in futex_do_wait (futex); 1 thread in disk sleep: nfs_wait_bit_killable``."""
    row = stack.main_row
    parts = []
    if row is not None:
        where = f" in {row.wchan}" if row.wchan else ""
        parts.append(f"main thread {row.state}{where}" + (f" ({row.call})" if row.call else ""))
    stuck = sorted({other.wchan or "?" for other in stack.rows if other.state == "disk sleep"})
    number = sum(other.state == "disk sleep" for other in stack.rows)
    parts += [f"{number} thread{'s' if number > 1 else ''} in disk sleep: {', '.join(stuck[:4])}"] if number else []
    return "; ".join(parts)


def plain_stack(one: RankStack, every: Sequence[RankStack]) -> dict[str, object]:
    """For scripts."""
    return {
        "rank": one.rank, "host": one.host, "pid": one.pid, "doing": list(one.doing), "frames": list(one.frames),
        "kernel": one.kernel, "gil_holder": list(one.holder), "problem": one.problem, "time": one.time, "seconds": one.seconds,
        "odd": one in odd(every),
    }  # fmt: skip


# --- beside a verdict ----------------------------------------------------------------------------------------------------


def beside(verdicts: Sequence[Verdict], pids: Iterable[int], ranks: dict[int, int | None], *, pause: bool) -> list[Verdict]:
    """Verdicts with what their culprits were doing, of those among ``pids`` of this node, and what a few peers did meanwhile."""
    known, host = set(pids), socket.gethostname()
    found: dict[int, RankStack] = {}
    told = []
    for verdict in verdicts:
        suspects = [one.pid for one in verdict.culprits if one.host == host and one.pid in known][:SUSPECTS]
        if not verdict.verdict_class.accuses or not suspects:
            told.append(verdict)
            continue
        waiting = [pid for pid, rank in sorted(ranks.items()) if rank in verdict.victims and pid not in suspects][:PEERS]
        wanted = [pid for pid in (*suspects, *waiting) if pid is not None and pid not in found]
        for stack in read_stacks(wanted, pause=pause, within_s=BESIDE_S):
            found[stack.pid] = shown(stack, ranks.get(stack.pid), host)
        told.append(_with(verdict, found, waiting))
    return told


def _with(verdict: Verdict, found: dict[int, RankStack], waiting: Sequence[int]) -> Verdict:
    lines = [_line(found[one.pid], verdict) for one in verdict.culprits if one.pid in found]
    peers = [found[pid] for pid in waiting if pid in found]
    lines += [f"meanwhile {_line(one, verdict)}" for one in peers[:1]]
    culprits = tuple(_doing(one, found) for one in verdict.culprits)
    return with_looked(replace(verdict, culprits=culprits, evidence=(*verdict.evidence, *lines)))


def _doing(culprit: Culprit, found: dict[int, RankStack]) -> Culprit:
    stack = found.get(culprit.pid) if culprit.pid is not None else None
    known = tuple(str(one) for one in stack.doing if one is not Doing.UNKNOWN) if stack is not None else ()
    return replace(culprit, doing=known)


def _line(one: RankStack, verdict: Verdict) -> str:
    """``rank 2 waits for its data loader: _next_data (torch/…:628) < __next__ (…), main thread sleeping in … (0.4s later)``."""
    what = one.doing[0].words if one.doing else Doing.UNKNOWN.words
    where = " < ".join(one.frames[:4])
    parts = [part for part in (where, one.kernel, one.problem if not one.frames else "") if part]
    age = f" ({duration(max(one.time - verdict.time, 0.0))} after the last sample)" if verdict.time is not None else ""
    return clean(f"{one.name} {what}: {'; '.join(parts)}{age}" if parts else f"{one.name} {what}{age}", 500)
