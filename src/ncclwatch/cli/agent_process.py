"""The agent itself, as ``ncclwatch agent`` becomes it: it imports what an agent runs and nothing else, for it stays for days."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ncclwatch.cli.ending import ended, prepare_streams
from ncclwatch.cli.haste import HASTE
from ncclwatch.cli.output import emit, flush
from ncclwatch.cli.wire_option import PROBE_PATHS, path_probes, wire_mode
from ncclwatch.stopping import stop_on_signals
from ncclwatch.text import clean, size

if TYPE_CHECKING:
    from collections.abc import Callable

    from ncclwatch.collect.batch import NodeBatch
    from ncclwatch.collect.ordering import OrderDesk
    from ncclwatch.messaging.agent import Agent
    from ncclwatch.model.state import ProcessInfo

OPTIONS_VARIABLE = "NCCLWATCH_AGENT_OPTIONS"
SUMMARY_EVERY_S = 60.0
RETURN_EVERY_S = 10.0
"""The memory that a look took is given back this often at most: it takes a millisecond."""
BUS = "nats://", "tls://"
"""How the address of a NATS server begins (``messaging.bus_keys.SCHEMES``, which an agent of an engine need not load)."""
COLLECT = 10_000, 10, 10
"""Python's thresholds of garbage collection: a look makes some thousands of records, which are no garbage yet."""
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What the command line asked for, as :mod:`ncclwatch.cli.agent` describes it."""

    engine: str
    pids: list[int]
    every: bool
    match: str | None
    keys: str | None
    job: str | None
    interval: float
    calm_interval: float
    probes: bool
    wire: str
    order_budget: float
    spool: str | None
    spool_mb: int
    spool_age: float
    user: str | None
    duration: float | None
    hurries: bool = False
    """Whether the priority is raised until it has attached."""
    probe_paths: str = PROBE_PATHS
    stacks: bool = True
    probe_files: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """As text, for the process that becomes the agent."""
        return json.dumps(asdict(self))


def main() -> None:
    """Be the agent that the environment describes."""
    prepare_streams()
    told = os.environ.pop(OPTIONS_VARIABLE, "")
    if not told:
        sys.exit("ncclwatch: error: this is a part of 'ncclwatch agent': start that")
    sys.exit(ended(lambda: run(AgentOptions(**json.loads(told)))))


def run(chosen: AgentOptions) -> None:
    """Watch and send until the end."""
    bus = chosen.engine.startswith(BUS)
    _do_without("typing_extensions")  # 0.5 MiB; msgspec takes what Python has since 3.11
    if not bus:
        _do_without("_hashlib")  # OpenSSL, 3.4 MiB: Python brings functions of its own, and an agent hashes a few names
    from ncclwatch.collect.node import NodeCollector
    from ncclwatch.collect.ordering import OrderDesk
    from ncclwatch.messaging.privileges import drop_privileges
    from ncclwatch.target.discover import find_processes
    from ncclwatch.target.held import dismiss

    HASTE.active = chosen.hurries
    spool = None if chosen.spool is None else Path(chosen.spool)
    stop = stop_on_signals()
    address, sender = _sender(chosen, spool, bus=bus)
    choose, how = _matching(chosen.match) if chosen.match else None, wire_mode(chosen.wire)
    collector = NodeCollector(
        every=not chosen.pids, interval_s=chosen.interval, stop=stop, choose=choose, common_ns=sender.engine_time_ns, wire=how,
        tell=_line, paths=path_probes(chosen.probe_paths), patient=True, widest_s=chosen.calm_interval,
        stacks=chosen.stacks, probe_files=[Path(file) for file in chosen.probe_files],
    )  # fmt: skip
    sender.link.on_order = collector.nudge
    sender.link.on_ease = lambda well, narrow: collector.ease.allow(time.monotonic(), well=well, narrow=narrow)
    desk = OrderDesk(collector, how[1], chosen.order_budget / 100)
    found = chosen.pids or [info.pid for info in find_processes() if choose is None or choose(info)]
    until = None if chosen.duration is None else time.monotonic() + chosen.duration
    try:
        first = collector.start(found, calls=chosen.probes, require=bool(chosen.pids))
        _line(f"watching {len(collector.infos)} processes for engine {address}")
        for problem in collector.problems:
            _line(f"not watched: {problem.line}")
        dismiss()
        _line(drop_privileges(chosen.user, spool))
        first.notes = (*first.notes, *sender.start(), *(f"not watched: {problem.line}" for problem in collector.problems))
        HASTE.end()
        _settle()
        _run(sender, first, lambda: collector.step(until=until), desk)
    finally:
        sender.close()
        collector.close()


def _sender(chosen: AgentOptions, spool: Path | None, *, bus: bool) -> tuple[str, Agent]:
    """Where batches go, and what brings them there."""
    from ncclwatch.messaging.agent import Agent

    keys = None if chosen.keys is None else Path(chosen.keys)
    agent = partial(
        Agent, token=chosen.job or "", host=socket.gethostname(),
        spool_folder=spool, spool_bytes=chosen.spool_mb << 20, spool_age_s=chosen.spool_age,
    )  # fmt: skip
    if bus:
        from ncclwatch.messaging.transports import bus_link

        link, key_every = bus_link(chosen.engine, keys)
        return chosen.engine, agent(chosen.engine, link=link, key_every=key_every)
    from ncclwatch.messaging import protocol
    from ncclwatch.messaging.keys import client_keys

    address = protocol.endpoint(chosen.engine)
    return address, agent(address, keys=client_keys(address, keys, "agent"))


def _do_without(module: str) -> None:
    """Let what would import a module find it missing, and take the other way that it has."""
    sys.modules.setdefault(module, None)  # type: ignore[arg-type]


def _settle() -> None:
    """What the start has left behind goes back to the system, and what stays for good is no longer looked through for garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT)
    _give_back()


def _give_back() -> None:
    """Memory that is free, which glibc keeps, goes back to the system. Another C library has no such function."""
    with contextlib.suppress(AttributeError):
        _libc.malloc_trim(0)


def _run(sender: Agent, batch: NodeBatch, step: Callable[[], NodeBatch], desk: OrderDesk) -> None:
    """Send batch after batch until the last, and do what the engine orders as far as the desk allows."""
    next_summary, next_return = time.monotonic() + SUMMARY_EVERY_S, 0.0
    while True:
        news = sender.link.take_news()
        batch.notes = (*batch.notes, *(text for text in news if "dropped" in text))
        for text in [*news, *batch.notes]:
            _line(text)
        sender.take(batch)
        if batch.looked and time.monotonic() >= next_return:
            next_return = time.monotonic() + RETURN_EVERY_S
            _give_back()
        if time.monotonic() >= next_summary:
            next_summary = time.monotonic() + SUMMARY_EVERY_S
            status = sender.link.status
            state = "connected" if status.connected else f"not connected ({status.reason})"
            _line(f"{state}; sent {status.sent_batches} batches, {size(status.sent_bytes)}; {status.waiting} waiting")
        if batch.finished:
            _line(f"end: {batch.finished}")
            return
        done = [line for order in sender.link.take_orders() if (line := desk.take(order))]
        batch = step()
        batch.notes = (*batch.notes, *done)


def _matching(text: str) -> Callable[[ProcessInfo], bool]:
    """Whether a process's command line or name holds a text."""
    return lambda info: text in " ".join(info.command) or text in info.name


def _line(text: str) -> None:
    emit(f"{time.strftime('%H:%M:%S')} {clean(text, 400)}")
    flush()


if __name__ == "__main__":
    main()
