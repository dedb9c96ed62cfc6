"""``ncclwatch engine``: diagnose jobs from what the agents of their nodes send."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclwatch.cli.asking import AskFileOption, Bell
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
    BusOption,
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
from ncclwatch.errors import UsageError
from ncclwatch.stopping import stop_on_signals

if TYPE_CHECKING:
    from ncclwatch.cli.engine_log import EngineLog
    from ncclwatch.cli.engine_service import Job
    from ncclwatch.cli.history_keeper import HistoryKeeper
    from ncclwatch.cli.hooks import HookSurface
    from ncclwatch.cli.metrics import MetricsServer
    from ncclwatch.cli.otlp import OtlpSurface
    from ncclwatch.engine.session import Update
    from ncclwatch.messaging.keys import Key, KnownKeys
    from ncclwatch.messaging.transport import HubMaker


def engine(
    bind: Annotated[
        str, typer.Option("--bind", "-b", metavar="ADDRESS", help="Where to listen: tcp://HOST:PORT.")
    ] = "tcp://127.0.0.1:7311",
    bus: BusOption = None,
    keys: KeysOption = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=60.0, help="Seconds between two verdicts.")] = 1.0,
    duration: DurationOption = None,
    as_json: JsonOption = False,
    metrics: MetricsOption = None, otlp: OtlpOption = None, history: HistoryOption = None,
    on_verdict: OnVerdictOption = None, hook_floor: HookFloorOption = HOOK_FLOOR, hook_log: HookLogOption = None,
    hook_cooldown: HookCooldownOption = HOOK_COOLDOWN_S, hook_dry_run: HookDryRunOption = False,
    traffic_every: Annotated[
        float, typer.Option("--traffic-every", min=0.1, max=1e6, help="Seconds between two lines about what came in.")
    ] = 60.0,
    hang_after: HangAfterOption = HANG_FLOOR_S, fixed: FixedOption = False, ask_file: AskFileOption = None,
    slow_mode: SlowModeOption = "ncclwatch", t_base: TBaseOption = None, theta: ThetaOption = 3.0,
) -> None:  # fmt: skip
    """Take what agents send, and say which rank, stage and link holds each job up. Watch it with 'ncclwatch top'."""
    from ncclwatch.cli.engine_log import EngineLog
    from ncclwatch.cli.engine_service import EngineService
    from ncclwatch.cli.surfaces import serving
    from ncclwatch.engine.patience import Patience

    address, pair, transport = way_in(bind, bus, keys)
    hook = hook_options(on_verdict, hook_floor, hook_cooldown, hook_log, dry_run=hook_dry_run)
    stop = stop_on_signals()
    service = EngineService(
        address,
        keys=pair,
        interval_s=interval,
        patience=lambda: Patience(hang_after, adaptive=not fixed),
        asked=Bell(ask_file).rung,
        slow=slow_rule(slow_mode, t_base, theta),
        transport=transport,
    )
    log = EngineLog(as_json=as_json, traffic_every_s=traffic_every)
    try:
        log.listening(service, secured=pair is not None, known=len(pair[1]) if pair else 0, bus=bus is not None)
        until = float("inf") if duration is None else time.monotonic() + duration
        kept = keeping(history, "engine", service)
        with serving(metrics) as also, exporting(otlp) as exports, hooked(hook) as hooks, kept as keepers:
            show = _shown(log, hooks, [*keepers, *exports, *also])
            while not stop.is_set() and time.monotonic() < until:
                service.step(show, until=until)
                log.traffic(service)
        log.end("interrupted" if stop.is_set() else "duration over")
    finally:
        service.close()


def _shown(
    log: EngineLog, hooks: Sequence[HookSurface], takers: Sequence[HistoryKeeper | OtlpSurface | MetricsServer]
) -> Callable[[Job, Update], None]:
    """What is done with an update of a job."""

    def show(job: Job, update: Update) -> None:
        for taker in takers:
            taker.take(job.session, update, job.name)
        for hook in hooks:
            hook.take(update, job.name)
        log.update(job, update)

    return show


def way_in(bind: str, bus: str | None, keys: Path | None) -> tuple[str, tuple[Key, KnownKeys] | None, HubMaker | None]:
    """How agents are heard: the address, the keys of ZeroMQ, what makes another transport. Raises ``UsageError``."""
    from ncclwatch.messaging import protocol
    from ncclwatch.messaging.bus_keys import bus_address, is_bus

    if bus is not None:
        from ncclwatch.messaging.transports import bus_hub

        return bus_address(bus), None, bus_hub(bus, keys)
    if is_bus(bind):
        raise UsageError(f"{bind} is a NATS server, which listens itself", f"write --bus {bind}")
    return protocol.endpoint(bind, bind=True), engine_keys(keys), None


def engine_keys(folder: Path | None) -> tuple[Key, KnownKeys] | None:
    """The engine's own key and those it knows."""
    if folder is None:
        return None
    from ncclwatch.messaging.keys import KnownKeys, own_key

    own, known = own_key(folder, "engine"), KnownKeys(folder)
    if not len(known):
        raise UsageError(f"{folder}/known holds no key", "make the agents' keys with 'ncclwatch keys make'")
    return own, known
