"""``ncclwatch attach``: watch a job live."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from ncclwatch.cli import options
from ncclwatch.cli.asking import AskFileOption, Bell
from ncclwatch.cli.haste import HASTE, tell, told
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
    ORDER_BUDGET,
    WIRE,
    AllOption,
    CalmIntervalOption,
    DurationOption,
    ExitCodeOption,
    FixedOption,
    HangAfterOption,
    IntervalOption,
    JsonOption,
    MetricsOption,
    OrderBudgetOption,
    PathsFilesOption,
    PidOption,
    ProbePathsOption,
    ProbesOption,
    SampleOption,
    SlowModeOption,
    StacksOption,
    TBaseOption,
    ThetaOption,
    WireOption,
    slow_rule,
)
from ncclwatch.cli.otlp import OtlpOption, exporting
from ncclwatch.cli.showing import show, surface_of
from ncclwatch.cli.surfaces import serving
from ncclwatch.cli.wire_option import PROBE_PATHS, path_probes, wire_mode
from ncclwatch.collect.ease import WIDEST_S
from ncclwatch.errors import ExitStatus, UsageError
from ncclwatch.stopping import stop_on_signals

if TYPE_CHECKING:
    from ncclwatch.collect.batch import NodeBatch

FIRST_LOOKS = 2


def attach(
    words: Annotated[list[str] | None, typer.Argument(metavar="[PID]...", help="More pids.")] = None,
    pid: PidOption = None,
    every: AllOption = False,
    duration: DurationOption = None,
    interval: IntervalOption = 1.0,
    calm_interval: CalmIntervalOption = WIDEST_S,
    as_json: JsonOption = False,
    calls: Annotated[bool, typer.Option("--calls", help="With --json: also one object for every call to NCCL.")] = False,
    exit_code: ExitCodeOption = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines as things change, also on a terminal.")] = False,
    probes: ProbesOption = True,
    wire: WireOption = WIRE,
    order_budget: OrderBudgetOption = ORDER_BUDGET,
    probe_paths: ProbePathsOption = PROBE_PATHS, stacks: StacksOption = True,
    hang_after: HangAfterOption = HANG_FLOOR_S, fixed: FixedOption = False,
    sample: SampleOption = None,
    ask_file: AskFileOption = None,
    metrics: MetricsOption = None, otlp: OtlpOption = None, paths: PathsFilesOption = None, history: HistoryOption = None,
    on_verdict: OnVerdictOption = None, hook_floor: HookFloorOption = HOOK_FLOOR, hook_log: HookLogOption = None,
    hook_cooldown: HookCooldownOption = HOOK_COOLDOWN_S, hook_dry_run: HookDryRunOption = False,
    slow_mode: SlowModeOption = "ncclwatch", t_base: TBaseOption = None, theta: ThetaOption = 3.0,
) -> int:  # fmt: skip
    """Watch NCCL processes live: operation, rate and steps of every rank, and a verdict when one holds the others up.

    On a terminal it is a dashboard: ? shows its keys, Enter opens a rank, its communicators, channels and steps, k its threads,
    v the verdict with all evidence, and again why; Space and [ ] go back in time; S saves a snapshot, R records. Into a file or
    pipe, or with --plain, it writes a line when something changes; with --json an object a line. NO_COLOR=1 leaves colours out.

    The job is not stopped, not written to and not signalled; leaving leaves it as it was.

    \b
    Examples:
      ncclwatch attach --all                        every NCCL process of this node
      ncclwatch attach --pid 4711 --metrics :9464   one process, with metrics for Prometheus
      ncclwatch attach --all --plain --exit-code    for scripts: ends with 10 when a verdict stands
    """
    if calls and not as_json:
        raise UsageError("--calls needs --json", "add --json")
    hook = hook_options(on_verdict, hook_floor, hook_cooldown, hook_log, dry_run=hook_dry_run)
    named, said = options.only_pids(pid, words, "snapshot files are for 'ncclwatch diagnose'"), said_by(as_json=as_json)
    from ncclwatch.cli.live import LiveSession, verdict_stands
    from ncclwatch.collect.sampling import Sampling
    from ncclwatch.engine.patience import Patience

    surface = surface_of(as_json=as_json, plain=plain, calls=calls)
    session = LiveSession(
        every=every, interval_s=interval, stop=stop_on_signals(),
        patience=Patience(hang_after, adaptive=not fixed), asked=Bell(ask_file).rung,
        sampling=None if sample is None else Sampling(sample), slow=slow_rule(slow_mode, t_base, theta),
        wire=wire_mode(wire), order_budget=order_budget / 100, paths=path_probes(probe_paths), tell=said,
        widest_s=0.0 if surface is None else calm_interval, stacks=stacks, probe_files=paths or (),
    )  # fmt: skip
    session.taps.append(_until_judged())
    with closing(session), serving(metrics) as also, exporting(otlp) as exports:
        session.start(options.choose_pids(named, every), calls=probes)
        with hooked(hook) as hooks, keeping(history, "attach", session) as kept:
            show(session, surface, duration, [*also, *kept, *exports, *hooks], paths or ())
    return ExitStatus.VERDICT if exit_code and verdict_stands(session.verdict) else ExitStatus.OK


def said_by(*, as_json: bool) -> Callable[[str], None]:
    """Where a start says what it does: on standard error, or nowhere (:func:`ncclwatch.cli.haste.told`)."""
    if not told(as_json=as_json):
        return lambda _: None
    tell("loading what judges")
    return tell


def _until_judged() -> Callable[[NodeBatch], None]:
    """Ends the haste of the start once the job was judged for the first time, or when it has cost enough."""
    looks = 0

    def take(batch: NodeBatch) -> None:
        nonlocal looks
        looks += batch.looked
        if looks > FIRST_LOOKS:
            HASTE.end()
        HASTE.check()

    return take
