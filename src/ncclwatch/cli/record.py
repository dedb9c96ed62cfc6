"""``ncclwatch record``: keep everything that is seen of a job in a file, for later and for elsewhere."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclwatch.cli import options
from ncclwatch.cli.options import (
    ORDER_BUDGET,
    WIRE,
    AllOption,
    DurationOption,
    IntervalOption,
    OrderBudgetOption,
    PathsFilesOption,
    PidOption,
    ProbesOption,
    WireOption,
)
from ncclwatch.cli.output import emit, flush, note
from ncclwatch.cli.wire_option import wire_mode
from ncclwatch.errors import ExitStatus, UsageError
from ncclwatch.stopping import stop_on_signals
from ncclwatch.text import clean, duration, size

if TYPE_CHECKING:
    from ncclwatch.cli.live import LiveSession
    from ncclwatch.store.recorder import Recorder

STATUS_EVERY_S = 60.0
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str) -> int:
    """``64M`` as a number of bytes (binary units, with or without ``B`` or ``iB``)."""
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = number[-1:] if number[-1:].isalpha() else ""
    digits = number.removesuffix(unit)
    try:
        value = float(digits) * _UNITS[unit]
    except (ValueError, KeyError):
        raise UsageError(f"'{clean(text, 40)}' is not a size", "write it like 64M or 2G") from None
    if not 0 < value < 1 << 50:
        raise UsageError(f"'{clean(text, 40)}' is not a size that a file can have", "write it like 64M or 2G")
    return int(value)


def record(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write; it must not exist.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[PID]...", help="More pids.")] = None,
    pid: PidOption = None,
    every: AllOption = False,
    duration: DurationOption = None,
    interval: IntervalOption = 1.0,
    max_size: Annotated[
        str | None,
        typer.Option("--max-size", metavar="SIZE", help="Keep the file at this size (64M, 2G), overwriting the oldest eighth."),
    ] = None,
    all_calls: Annotated[
        bool, typer.Option("--all-calls", help="Keep every field of every call; without, what a diagnosis needs of operations.")
    ] = False,
    probes: ProbesOption = True,
    wire: WireOption = WIRE,
    order_budget: OrderBudgetOption = ORDER_BUDGET,
    paths: PathsFilesOption = None,
) -> int:
    """Record NCCL processes of this node into a file, until they end or Ctrl-C.

    The file can be read while it is written, and after a crash up to its last whole sample: 'ncclwatch replay FILE' shows it
    in the dashboard, 'diagnose FILE' judges it, 'report FILE' makes a page of it; all three take the files of several nodes.

    When the disk is full a line says so, and recording goes on when there is room again.

    \b
    Examples:
      ncclwatch record --all -o job.recording                    until Ctrl-C
      ncclwatch record --all -o ring.recording --max-size 256M   the last hours, never more than 256 MiB
    """
    named = options.only_pids(pid, words, "name the file to write with -o FILE")
    cap = parse_size(max_size) if max_size else None
    chosen = options.choose_pids(named, every)
    from ncclwatch.cli.live import LiveSession, until_of
    from ncclwatch.store.recorder import Recorder

    session = LiveSession(
        every=every, interval_s=interval, stop=stop_on_signals(), wire=wire_mode(wire), order_budget=order_budget / 100,
        probe_files=paths or (),
    )  # fmt: skip
    recorder = Recorder(output, cap_bytes=cap, calls="all" if all_calls else "ledger", about={"command": "record"})
    reason = "ended by an error"
    try:
        session.taps.append(recorder.put)
        session.start(chosen, calls=probes)
        reason = _run(session, recorder, until_of(duration))
    except BaseException:
        if not recorder.status.batches:
            recorder.close(reason)
            output.unlink(missing_ok=True)
        raise
    finally:
        session.close()
        status = recorder.close(reason)
    lost, name = f"; {status.dropped} batches were NOT recorded" if status.dropped else "", clean(str(output))
    emit(f"{name}: {size(status.written)}, {reason}{lost}: see it with 'ncclwatch replay {name}'")
    note(status.problem) if status.problem else None
    return ExitStatus.OK


def _run(session: LiveSession, recorder: Recorder, until: float | None) -> str:
    """Record until the session ends; a line when something is wrong, and once a minute."""
    began = time.monotonic()
    next_status = began + STATUS_EVERY_S
    count = len(session.infos)
    emit(f"recording {count} process{'es' if count != 1 else ''} into {clean(str(recorder.path))}; Ctrl-C ends")
    for unread in session.problems:
        note(f"not watched: {unread.line}")
    flush()
    problem = ""
    while True:
        update = session.step(until=until)
        status = recorder.status
        if status.problem != problem:
            problem = status.problem
            note(problem or "recording goes on")
        for verdict in update.told:
            emit(f"{time.strftime('%H:%M:%S')} {verdict.verdict_class.value.upper()}  {clean(verdict.summary, 300)}")
        for recovery in update.recoveries:
            emit(f"{time.strftime('%H:%M:%S')} RECOVERED after {duration(recovery.duration_s)}")
        if time.monotonic() >= next_status:
            next_status += STATUS_EVERY_S
            emit(f"{time.strftime('%H:%M:%S')} {size(status.written)} after {duration(time.monotonic() - began)}")
        flush()
        if update.finished:
            return update.finished
