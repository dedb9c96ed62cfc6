"""``ncclwatch top``: what ``attach`` shows, for a whole job, from its engine."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from ncclwatch.cli.options import DurationOption, ExitCodeOption, JobOption, JsonOption, KeysOption
from ncclwatch.cli.output import emit, emit_json
from ncclwatch.cli.showing import show, surface_of
from ncclwatch.errors import ExitStatus
from ncclwatch.stopping import stop_on_signals
from ncclwatch.text import clean, columns


def top(
    engine: Annotated[
        str,
        typer.Option("--engine", "-e", metavar="ADDRESS", help="The engine: tcp://HOST:PORT, or a NATS server: tls://HOST:PORT."),
    ] = "127.0.0.1",
    fleet: Annotated[
        str | None,
        typer.Option(
            "--fleet", metavar="ADDRESS",
            help="A fleet, by its NATS server: its jobs, or with --job NAME one of them; needs an engine's key.",
        ),
    ] = None,
    keys: KeysOption = None,
    job: JobOption = None,
    duration: DurationOption = None,
    as_json: JsonOption = False,
    exit_code: ExitCodeOption = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines as things change, also on a terminal.")] = False,
) -> int:  # fmt: skip
    """Watch a whole job from its engine: every rank of every node, and the verdict. Of a fleet: its jobs."""
    from ncclwatch.cli.live import verdict_stands
    from ncclwatch.remote.connect import connecting, engine_address, following

    stop = stop_on_signals()
    if fleet is not None and not job:
        _list(fleet, keys, as_json=as_json)
        return ExitStatus.OK
    connect = connecting(engine_address(engine), keys, job or "") if fleet is None else following(fleet, keys, job or "")
    session = connect(stop)
    try:
        session.start(duration)
        show(session, surface_of(as_json=as_json, plain=plain), duration)
    finally:
        session.close()
    return ExitStatus.VERDICT if exit_code and verdict_stands(session.verdict) else ExitStatus.OK


def _list(fleet: str, keys: Path | None, *, as_json: bool) -> None:
    """The jobs that a fleet judges, and what stands in each."""
    from ncclwatch.cli.fleet import bus_connection

    connect = bus_connection(fleet, keys)
    from ncclwatch.fleet.judged import judged

    with connect as connection:
        found = judged(connection)
    if as_json:
        emit_json({"jobs": [{"job": one.job, "told": one.told_s or None, "verdict": one.verdict} for one in found]})
        return
    rows = [
        [one.job, f"{datetime.fromtimestamp(one.told_s, UTC):%Y-%m-%d %H:%M:%S}" if one.told_s else "-",
         "-" if one.verdict is None else str(one.verdict["class"]),
         "" if one.verdict is None else clean(str(one.verdict["summary"]), 300)]
        for one in found
    ]  # fmt: skip
    for line in columns(("JOB", "TOLD (UTC)", "CLASS", "WHAT STANDS"), rows) if rows else ["no job is judged now"]:
        emit(line)
