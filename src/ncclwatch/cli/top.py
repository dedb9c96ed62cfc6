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
    from ncclwatch.messaging.bus_keys import is_bus
    from ncclwatch.remote.session import RemoteSession

    stop = stop_on_signals()
    if is_bus(engine):
        from ncclwatch.messaging.transports import bus_viewer

        viewer = bus_viewer(engine, keys, job or "")
        session = RemoteSession(viewer.address, stop=stop, transport=viewer)
    else:
        from ncclwatch.messaging import protocol
        from ncclwatch.messaging.keys import client_keys

        address = protocol.endpoint(engine)
        session = RemoteSession(address, keys=client_keys(address, keys, "viewer"), token=job or "", stop=stop)
    try:
        session.start(duration)
        show(session, surface_of(as_json=as_json, plain=plain), duration)
    finally:
        session.close()
    return ExitStatus.VERDICT if exit_code and verdict_stands(session.verdict) else ExitStatus.OK
