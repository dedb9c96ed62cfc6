"""``ncclwatch fleet``: hearing workers and judges of many jobs, over a NATS server."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclwatch.cli.history_keeper import HistoryOption, keeping
from ncclwatch.cli.hooks import (
    HOOK_COOLDOWN_S,
    HOOK_FLOOR,
    HookCooldownOption,
    HookDryRunOption,
    HookFloorOption,
    HookLogOption,
    OnVerdictOption,
    hook_options,
    hooked,
)
from ncclwatch.cli.options import (
    HANG_FLOOR_S,
    DurationOption,
    FixedOption,
    HangAfterOption,
    JsonOption,
    KeysOption,
    MetricsOption,
    SlowModeOption,
    TBaseOption,
    ThetaOption,
    slow_rule,
)
from ncclwatch.cli.otlp import OtlpOption, exporting
from ncclwatch.stopping import stop_on_signals

if TYPE_CHECKING:
    from ncclwatch.cli.engine_service import Job
    from ncclwatch.cli.history_keeper import HistoryKeeper
    from ncclwatch.cli.metrics import MetricsServer
    from ncclwatch.cli.otlp import OtlpSurface
    from ncclwatch.engine.session import Update
    from ncclwatch.fleet.connection import Connection
    from ncclwatch.model.verdict import Verdict

LEASE_S = 3.0
STEP_S = 0.2

app = typer.Typer(
    help="Many jobs over a NATS server: workers that hear agents, and one judge a job (docs/fleet.md).",
    no_args_is_help=True,
    rich_markup_mode=None,
)

BusOption = Annotated[
    str, typer.Option("--bus", metavar="ADDRESS", help="The NATS server: tls://HOST:PORT, or nats://127.0.0.1:PORT.")
]
TrafficOption = Annotated[
    float, typer.Option("--traffic-every", min=0.1, max=1e6, help="Seconds between two lines about what came in.")
]
LeaseOption = Annotated[
    float,
    typer.Option(
        "--lease", min=0.5, max=60.0,
        help="Seconds after which the work of a process that died is another's; the same for all workers and judges.",
    ),
]  # fmt: skip


@app.command("hear", short_help="A worker: hear agents, send on to judges.")
def hear(
    bus: BusOption,
    keys: KeysOption = None,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, max=60.0, help="Seconds between two messages to the judge of a job.")
    ] = 1.0,
    duration: DurationOption = None,
    as_json: JsonOption = False,
    metrics: MetricsOption = None,
    traffic_every: TrafficOption = 60.0,
    lease: LeaseOption = LEASE_S,
) -> None:
    """Hear a share of the nodes: check and decode what their agents send, find the jobs, and send it on to their judges.

    As many as are wanted run beside each other; nodes are divided among them, and those of one that dies are heard by the others.
    """
    connect = bus_connection(bus, keys)
    from ncclwatch.cli.fleet_log import HearLog
    from ncclwatch.cli.surfaces import serving_worker
    from ncclwatch.fleet.worker import Worker

    stop, log = stop_on_signals(), HearLog(as_json=as_json, traffic_every_s=traffic_every)
    with ExitStack() as ending:
        worker = Worker(ending.enter_context(connect), interval_s=interval, ttl_s=lease)
        ending.callback(worker.close)
        told = [worker.state]
        ending.enter_context(serving_worker(metrics, told))
        log.begun(bus, worker.name)
        until = float("inf") if duration is None else time.monotonic() + duration
        while not stop.is_set() and time.monotonic() < until:
            worker.step(STEP_S)
            told[0] = worker.state
            log.worker(worker)
        log.end("interrupted" if stop.is_set() else "duration over")


@app.command("judge", short_help="A judge: say which rank holds each job up.")
def judge(
    bus: BusOption,
    keys: KeysOption = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=60.0, help="Seconds between two verdicts.")] = 1.0,
    duration: DurationOption = None,
    as_json: JsonOption = False,
    metrics: MetricsOption = None, otlp: OtlpOption = None, history: HistoryOption = None,
    on_verdict: OnVerdictOption = None, hook_floor: HookFloorOption = HOOK_FLOOR, hook_log: HookLogOption = None,
    hook_cooldown: HookCooldownOption = HOOK_COOLDOWN_S, hook_dry_run: HookDryRunOption = False,
    traffic_every: TrafficOption = 60.0,
    lease: LeaseOption = LEASE_S,
    hang_after: HangAfterOption = HANG_FLOOR_S, fixed: FixedOption = False,
    slow_mode: SlowModeOption = "ncclwatch", t_base: TBaseOption = None, theta: ThetaOption = 3.0,
) -> None:  # fmt: skip
    """Judge a share of the jobs, each job by one judge alone, and append what is said to the log of verdicts.

    As many as are wanted run beside each other; jobs of one that dies are judged by the others within seconds.
    """
    connect = bus_connection(bus, keys)
    from ncclwatch.cli.engine_service import EngineService
    from ncclwatch.cli.fleet_judging import Judging
    from ncclwatch.cli.fleet_log import JudgeLog
    from ncclwatch.cli.surfaces import serving
    from ncclwatch.engine.patience import Patience

    hook = hook_options(on_verdict, hook_floor, hook_cooldown, hook_log, dry_run=hook_dry_run)
    service = partial(
        EngineService,
        bus,
        interval_s=interval,
        patience=lambda: Patience(hang_after, adaptive=not fixed),
        slow=slow_rule(slow_mode, t_base, theta),
    )
    stop, name, log = stop_on_signals(), secrets.token_hex(6), JudgeLog(as_json=as_json, traffic_every_s=traffic_every)
    with ExitStack() as ending:
        connection = ending.enter_context(connect)
        judging = Judging(connection, name, lambda transport: service(transport=transport), log, ttl_s=lease)
        ending.callback(judging.close)
        hooks = ending.enter_context(hooked(hook))
        beside: list[HistoryKeeper | OtlpSurface | MetricsServer] = [*ending.enter_context(serving(metrics))]
        beside += ending.enter_context(keeping(history, "judge", judging.service))
        beside += ending.enter_context(exporting(otlp))
        log.begun(bus, name)

        def show(job: Job, update: Update, new: Sequence[Verdict]) -> None:
            for one in hooks:
                one.hook.take(new, job.name)
                update.notes += one.hook.lines()
            for each in beside:
                each.take(job.session, update, job.name)
            log.update(job, update)

        until = float("inf") if duration is None else time.monotonic() + duration
        while not stop.is_set() and time.monotonic() < until:
            judging.step(show, until=until)
            log.traffic(judging.service)
        log.end("interrupted" if stop.is_set() else "duration over")


def bus_connection(bus: str, keys: Path | None) -> Connection:
    """A connection that is not open yet; raises :class:`UsageError`, or what says that the client is not installed."""
    from ncclwatch.messaging.bus_keys import access
    from ncclwatch.messaging.transports import require_client

    require_client()
    from ncclwatch.fleet.connection import Connection

    return Connection(access(bus, keys, "engine"))
