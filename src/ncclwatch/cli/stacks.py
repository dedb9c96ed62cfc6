"""``ncclwatch stacks``: where ranks stand, as one grid with the odd ones out; and the same beside a verdict."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

import typer

from ncclwatch.cli import options
from ncclwatch.cli.options import AllOption, AllowPauseOption, JsonOption, PidOption
from ncclwatch.cli.output import emit, emit_json
from ncclwatch.collect.suspects import process_look
from ncclwatch.knowledge.looks import PEERS, SUSPECTS, doing_of, with_stacks
from ncclwatch.model.looks import ProcessLook
from ncclwatch.model.verdict import Verdict
from ncclwatch.target.stacks import ProcessStack, read_stacks
from ncclwatch.text import Style, wrap
from ncclwatch.view.stack_grid import RankStack, grid_lines, odd

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
    look = process_look(stack, host)
    frames = tuple(text for _, _, text in look.frames)
    return RankStack(
        rank, host, look.pid, doing_of(look), frames, look.kernel, look.time, look.problem, look.holder, look.seconds
    )  # fmt: skip


def plain_stack(one: RankStack, every: Sequence[RankStack]) -> dict[str, object]:
    """For scripts."""
    return {
        "rank": one.rank, "host": one.host, "pid": one.pid, "doing": list(one.doing), "frames": list(one.frames),
        "kernel": one.kernel, "gil_holder": list(one.holder), "problem": one.problem, "time": one.time, "seconds": one.seconds,
        "odd": one in odd(every),
    }  # fmt: skip


# --- beside a verdict ----------------------------------------------------------------------------------------------------


def beside(
    verdicts: Sequence[Verdict], ranks: Mapping[int, int | None], proxies: Mapping[int, Collection[int]], *, pause: bool
) -> list[Verdict]:
    """Verdicts with what their culprits were doing, of those of this node whose pids are in ``ranks``, and what a few peers did
    meanwhile. ``proxies``: the ids of NCCL's progress threads in each process.
    """
    host = socket.gethostname()
    found: dict[tuple[str, int], ProcessLook] = {}
    told = []
    for verdict in verdicts:
        suspects = [one.pid for one in verdict.culprits if one.host == host and one.pid in ranks][:SUSPECTS]
        if not verdict.verdict_class.accuses or not suspects:
            told.append(verdict)
            continue
        waiting = [pid for pid, rank in sorted(ranks.items()) if rank in verdict.victims and pid not in suspects][:PEERS]
        wanted = [pid for pid in (*suspects, *waiting) if pid is not None and (host, pid) not in found]
        for stack in read_stacks(wanted, pause=pause, within_s=BESIDE_S, proxies=proxies):
            found[host, stack.pid] = process_look(stack, host)
        peers = [found[host, pid] for pid in waiting if (host, pid) in found]
        told.append(with_stacks(verdict, found, peers, lambda look: _name(look, ranks)))
    return told


def _name(look: ProcessLook, ranks: Mapping[int, int | None]) -> str:
    rank = ranks.get(look.pid)
    return f"pid {look.pid}" if rank is None else f"rank {rank}"
