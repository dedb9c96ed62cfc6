"""``ncclwatch top``: what ``attach`` shows, for a whole job, from its engine."""

from __future__ import annotations

from typing import Annotated

import typer

from ncclwatch.cli.options import DurationOption, ExitCodeOption, JobOption, JsonOption, KeysOption
from ncclwatch.cli.showing import show, surface_of
from ncclwatch.errors import ExitStatus
from ncclwatch.stopping import stop_on_signals


def top(
    engine: Annotated[
        str,
        typer.Option("--engine", "-e", metavar="ADDRESS", help="The engine: tcp://HOST:PORT, or a NATS server: tls://HOST:PORT."),
    ] = "127.0.0.1",
    keys: KeysOption = None,
    job: JobOption = None,
    duration: DurationOption = None,
    as_json: JsonOption = False,
    exit_code: ExitCodeOption = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines as things change, also on a terminal.")] = False,
) -> int:
    """Watch a whole job from its engine: every rank of every node, and the verdict."""
    from ncclwatch.cli.live import verdict_stands
    from ncclwatch.remote.connect import connecting, engine_address

    stop = stop_on_signals()
    session = connecting(engine_address(engine), keys, job or "")(stop)
    try:
        session.start(duration)
        show(session, surface_of(as_json=as_json, plain=plain), duration)
    finally:
        session.close()
    return ExitStatus.VERDICT if exit_code and verdict_stands(session.verdict) else ExitStatus.OK
