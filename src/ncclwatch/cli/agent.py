"""``ncclwatch agent``: watch the NCCL processes of this node and send what is seen to an engine."""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source
from pathlib import Path
from typing import Annotated

import typer

from ncclwatch.cli import agent_process, options
from ncclwatch.cli.agent_process import OPTIONS_VARIABLE, AgentOptions
from ncclwatch.cli.haste import HASTE
from ncclwatch.cli.options import (
    ORDER_BUDGET,
    WIRE,
    AllOption,
    CalmIntervalOption,
    DurationOption,
    IntervalOption,
    JobOption,
    KeysOption,
    OrderBudgetOption,
    PathsFilesOption,
    PidOption,
    ProbePathsOption,
    ProbesOption,
    StacksOption,
    WireOption,
)
from ncclwatch.cli.output import flush
from ncclwatch.cli.wire_option import PROBE_PATHS, wire_mode
from ncclwatch.collect.ease import WIDEST_S
from ncclwatch.errors import UsageError


def agent(
    engine: Annotated[
        str,
        typer.Option("--engine", "-e", metavar="ADDRESS", help="The engine: tcp://HOST:PORT, or a NATS server: tls://HOST:PORT."),
    ],
    pid: PidOption = None,
    every: AllOption = False,
    match: Annotated[
        str | None, typer.Option("--match", metavar="TEXT", help="NCCL processes whose command line holds this text.")
    ] = None,
    keys: KeysOption = None,
    job: JobOption = None,
    interval: IntervalOption = 1.0,
    calm_interval: CalmIntervalOption = WIDEST_S,
    probes: ProbesOption = True,
    wire: WireOption = WIRE,
    order_budget: OrderBudgetOption = ORDER_BUDGET,
    probe_paths: ProbePathsOption = PROBE_PATHS,
    stacks: StacksOption = True,
    paths: PathsFilesOption = None,
    spool: Annotated[
        Path | None, typer.Option("--spool", metavar="FOLDER", help="Keep what cannot be sent here, also over a restart.")
    ] = None,
    spool_mb: Annotated[int, typer.Option("--spool-mb", min=1, max=1 << 20, help="Size of the spool at most, MiB.")] = 64,
    spool_age: Annotated[float, typer.Option("--spool-age", min=1.0, max=1e7, help="Seconds until it is too old.")] = 3600.0,
    user: Annotated[
        str | None, typer.Option("--user", metavar="NAME", help="Run as this user once started (keeps the capabilities needed).")
    ] = None,
    duration: DurationOption = None,
) -> None:
    """Watch NCCL processes of this node, as they come and go, and send what is seen to an engine. Judges nothing itself."""
    named = options.pids(pid)
    if (bool(named) + every + bool(match)) != 1:
        raise UsageError("an agent watches --all, --pid or --match processes", "give one of them")
    wire_mode(wire)
    become(
        AgentOptions(
            engine, named, every, match, _text(keys), job, interval, calm_interval, probes, wire, order_budget, _text(spool),
            spool_mb, spool_age, user, duration, HASTE.active, probe_paths, stacks,
            [str(file.absolute()) for file in paths or ()],
        )
    )  # fmt: skip


def become(chosen: AgentOptions) -> None:
    """Go on as a program of its own that has loaded nothing but what an agent runs: it stays for days, and what reads a command
    line takes 20 MiB. Pid, descriptors and environment stay the same.
    """
    flush()
    # -P: the current folder may be anybody's, and nothing in it shall be imported as root.
    command = [sys.executable, "-P", *without_docstrings(), "-m", "ncclwatch.cli.agent_process", *sys.argv[1:]]
    # An agent multiplies no matrices, and its threads mostly sleep: neither needs memory of its own for each CPU.
    spared = {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    os.execve(sys.executable, command, {**spared, **os.environ, OPTIONS_VARIABLE: chosen.to_json()})  # noqa: S606 - no shell is wanted


def without_docstrings() -> list[str]:
    """``-OO`` where it saves memory: an agent needs no docstrings, which are 3 MiB. Python compiles modules anew for it. At each
    start that takes as much, unless the result is kept: it lies there already, as in the image, or its folder can be written.
    """
    kept = Path(cache_from_source(agent_process.__file__, optimization=2))
    folder = next(parent for parent in kept.parents if parent.exists())
    return ["-OO"] if kept.exists() or (not sys.dont_write_bytecode and os.access(folder, os.W_OK)) else []


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
