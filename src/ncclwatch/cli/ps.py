"""``ncclwatch ps``: the NCCL processes of this node, one line each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ncclwatch.cli import labels
from ncclwatch.cli.options import JsonOption
from ncclwatch.cli.output import emit, emit_json, note, plain
from ncclwatch.model.state import ProcessInfo
from ncclwatch.text import clean, columns

_HEADER = ("PID", "RANK", "LOCAL", "NCCL", "STATE", "IN-NS", "CONTAINER", "LIBRARY", "COMMAND")


def ps(as_json: JsonOption = False) -> None:
    """List the NCCL processes of this node."""
    from ncclwatch.target.discover import survey
    from ncclwatch.target.process import run_state

    seen = survey()
    processes = sorted(seen.found, key=lambda process: labels.sort_key(process.info))
    found, others = [process.info for process in processes], [[binary.path for binary in process.others] for process in processes]
    states = [run_state(info.pid) for info in found]
    if as_json:
        told = zip(found, others, states, strict=True)
        emit_json([{**plain(info), "pid": info.pid, "other_libraries": more, "run_state": state} for info, more, state in told])
        return
    if found:
        for line in table(found, others, states):
            emit(line)
    else:
        note("no NCCL process found on this node")
    if seen.unreadable and os.geteuid() != 0:
        note(f"{seen.unreadable} processes are closed to this user: run as root to see whether they use NCCL")
    for error in seen.held[:4]:
        note(str(error))


def table(found: Sequence[ProcessInfo], others: Sequence[Sequence[str]], states: Sequence[str]) -> list[str]:
    """Aligned lines, heading first; columns that say nothing about any process are left out. ``others``: paths of further NCCL
    libraries in the process, of which calls are seen and memory is not read.
    """
    rows = [
        (
            str(info.pid),
            labels.rank(info),
            "" if info.local_rank is None else str(info.local_rank),
            labels.version(info),
            labels.run_state(state),
            str(info.pid_in_target) if info.pid_in_target not in (None, info.pid) else "",
            clean(info.container_id, 12).rstrip("…"),
            ("static: " if info.statically_linked else "")
            + clean(Path(info.library).name, 40)
            + (f" +{len(more)}" if more else ""),
            labels.command(info, 80),
        )
        for info, more, state in zip(found, others, states, strict=True)
    ]
    return columns(_HEADER, rows, right=(0, 1, 2, 5))
