"""``ncclwatch agent``: watch the NCCL processes of this node and send what is seen to an engine."""

from __future__ import annotations

import socket
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
    JobOption,
    KeysOption,
    OrderBudgetOption,
    PidOption,
    ProbePathsOption,
    ProbesOption,
    WireOption,
)
from ncclwatch.cli.output import emit, flush
from ncclwatch.errors import UsageError
from ncclwatch.stopping import stop_on_signals
from ncclwatch.text import clean, size

if TYPE_CHECKING:
    from collections.abc import Callable

    from ncclwatch.collect.batch import NodeBatch
    from ncclwatch.collect.ordering import OrderDesk
    from ncclwatch.messaging.agent import Agent
    from ncclwatch.model.state import ProcessInfo

SUMMARY_EVERY_S = 60.0


def agent(
    engine: Annotated[str, typer.Option("--engine", "-e", metavar="ADDRESS", help="The engine: tcp://HOST:PORT.")],
    pid: PidOption = None,
    every: AllOption = False,
    match: Annotated[
        str | None, typer.Option("--match", metavar="TEXT", help="NCCL processes whose command line holds this text.")
    ] = None,
    keys: KeysOption = None,
    job: JobOption = None,
    interval: IntervalOption = 1.0,
    probes: ProbesOption = True,
    wire: WireOption = WIRE,
    order_budget: OrderBudgetOption = ORDER_BUDGET,
    probe_paths: ProbePathsOption = None,
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
    from ncclwatch.cli.remote import client_keys
    from ncclwatch.collect.node import NodeCollector
    from ncclwatch.collect.ordering import OrderDesk
    from ncclwatch.messaging import protocol
    from ncclwatch.messaging.agent import Agent
    from ncclwatch.messaging.privileges import drop_privileges
    from ncclwatch.target.discover import find_processes

    address, stop = protocol.endpoint(engine), stop_on_signals()
    sender = Agent(
        address, keys=client_keys(address, keys, "agent"), token=job or "", host=socket.gethostname(),
        spool_folder=spool, spool_bytes=spool_mb << 20, spool_age_s=spool_age,
    )  # fmt: skip
    choose, how, paths = matching(match) if match else None, options.wire_mode(wire), options.path_probes(probe_paths)
    collector = NodeCollector(
        every=not named, interval_s=interval, stop=stop, choose=choose, common_ns=sender.engine_time_ns, wire=how, paths=paths,
    )  # fmt: skip
    desk = OrderDesk(collector, how[1], order_budget / 100)
    found = named or [info.pid for info in find_processes() if choose is None or choose(info)]
    until = None if duration is None else time.monotonic() + duration
    try:
        first = collector.start(found, calls=probes, require=bool(named))
        _line(f"watching {len(collector.infos)} processes for engine {address}")
        for problem in collector.problems:
            _line(f"not watched: {problem.line}")
        _line(drop_privileges(user, spool))
        first.notes = (*first.notes, *sender.start(), *(f"not watched: {problem.line}" for problem in collector.problems))
        _run(sender, first, lambda: collector.step(until=until), desk)
    finally:
        sender.close()
        collector.close()


def _run(sender: Agent, batch: NodeBatch, step: Callable[[], NodeBatch], desk: OrderDesk) -> None:
    """Send batch after batch until the last, and do what the engine orders as far as the desk allows."""
    next_summary = time.monotonic() + SUMMARY_EVERY_S
    while True:
        news = sender.link.take_news()
        batch.notes = (*batch.notes, *(text for text in news if "dropped" in text))
        for text in [*news, *batch.notes]:
            _line(text)
        sender.take(batch)
        if time.monotonic() >= next_summary:
            next_summary = time.monotonic() + SUMMARY_EVERY_S
            status = sender.link.status
            state = "connected" if status.connected else f"not connected ({status.reason})"
            _line(f"{state}; sent {status.sent_batches} batches, {size(status.sent_bytes)}; {status.waiting} waiting")
        if batch.finished:
            _line(f"end: {batch.finished}")
            return
        done = [desk.take(order) for order in sender.link.take_orders()]
        batch = step()
        batch.notes = (*batch.notes, *done)


def matching(text: str) -> Callable[[ProcessInfo], bool]:
    """Whether a process's command line or name holds a text."""
    return lambda info: text in " ".join(info.command) or text in info.name


def _line(text: str) -> None:
    emit(f"{time.strftime('%H:%M:%S')} {clean(text, 400)}")
    flush()
