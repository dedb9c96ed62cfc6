"""``ncclwatch paths follow``: keep looking at this host's paths, and write a new plan as soon as one of them changes or dies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclwatch.cli.options import JsonOption, PidOption, only_pids
from ncclwatch.cli.output import emit, emit_json, flush
from ncclwatch.cli.paths_probe import route
from ncclwatch.errors import NcclwatchError, UsageError
from ncclwatch.model.paths import Protocol
from ncclwatch.stopping import stop_on_signals
from ncclwatch.text import clean

if TYPE_CHECKING:
    from ncclwatch.cli.paths_keeper import Change, Keeper
    from ncclwatch.cli.paths_rates import Rates
    from ncclwatch.model.paths import Probe
    from ncclwatch.paths.measured_plan import MeasuredPlan
    from ncclwatch.paths.trial import Fall

SCHEMA_NAME = "ncclwatch.pathfollow/1"
RATES_S = 0.5
"""Between two looks at rates, at most."""


def follow(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Flow maps and probes, as of 'paths plan'; also of other hosts.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The plan, written anew when it changes.")],
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="FILE", help="What was seen, anew with each plan: for --paths of 'attach' and 'agent'."),
    ] = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=3600.0, help="Seconds between two looks at paths.")] = 0.5,
    duration: Annotated[
        float | None, typer.Option("--duration", "-d", min=0.1, max=1e8, help="Seconds after which to end.")
    ] = None,
    pid: PidOption = None,
    every: Annotated[
        bool,
        typer.Option(
            "--all", "-a", help="Compare rates before and after the plan: of every NCCL process in this network namespace."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Look at this host's paths twice a second; where one changes or dies, write a new plan of this host's ports at once.

    What the network reroutes by itself is said apart. Connections that exist stay: the next communicator takes the new ports.
    With --all or --pid the rates of this host's flows are watched too: where they fall with the plan it is taken back at once.
    """
    from ncclwatch.cli.paths_inputs import inputs_of
    from ncclwatch.cli.paths_keeper import Keeper
    from ncclwatch.cli.paths_rates import Rates

    named = only_pids(pid, None, "rates are of running processes")
    if named and every:
        raise UsageError("--pid and --all exclude each other", "give one of them")
    given = inputs_of(files)
    mine = [one for one in given.probes if one.protocol is Protocol.TCP and _is_here(one)]
    if not mine or not given.flows:
        raise UsageError(
            "these files hold no probe from this host over TCP, or no flow", "run 'ncclwatch paths probe -o FILE' here first"
        )
    stop = stop_on_signals()
    ends = time.monotonic() + (duration or 1e9)
    keeper = Keeper(given.flows, given.probes, {one.source for one in mine}, output, given.told)
    _say(keeper.publish(), [], 0.0, as_json)
    keeper.keep(keep)
    rates = Rates(named, every=every) if named or every else None
    due = time.monotonic() + interval
    with closing(rates) if rates is not None else nullcontext():
        while not stop.wait(max(0.0, min(due, ends) - time.monotonic() if rates is None else min(interval, RATES_S))):
            began = time.monotonic()
            if began >= ends:
                break
            if began >= due:
                if changes := keeper.look():
                    _say(keeper.publish(), changes, time.monotonic() - began, as_json)
                    keeper.keep(keep)
                due = time.monotonic() + interval
            if rates is not None:
                _compare(keeper, rates, output, as_json)


def _is_here(probe: Probe) -> bool:
    from ncclwatch.pathprobe.look import own_address

    try:
        return own_address(probe.destination) == probe.source
    except NcclwatchError:
        return False


def _compare(keeper: Keeper, rates: Rates, output: Path, as_json: bool) -> None:
    """Look at the rates once, and say what that comes to where it is new."""
    known = keeper.compares_with
    fall = keeper.judge(rates.look())
    if fall is not None:
        _say_taken_back(fall, output, as_json)
    elif known is None and (before := keeper.compares_with) is not None:
        if as_json:
            emit_json({"schema": SCHEMA_NAME, "wall_s": time.time(), "compares_with_bytes_per_s": before}, indent=None)
        else:
            emit(
                f"rates on the plan will be compared with those of now: {before / 1e6:,.1f} MB/s of the slowest flow of this host"
            )
        flush()


def _say_taken_back(fall: Fall, output: Path, as_json: bool) -> None:
    if as_json:
        back = {"before_bytes_per_s": fall.before, "after_bytes_per_s": fall.after}
        emit_json({"schema": SCHEMA_NAME, "wall_s": time.time(), "taken_back": back}, indent=None)
    else:
        emit(
            f"taken back: on the plan the slowest flow of this host has {fall.after / 1e6:,.1f} MB/s, before it had "
            f"{fall.before / 1e6:,.1f} MB/s; {clean(str(output))} is what it was, for the next communicator"
        )
    flush()


def _say(made: MeasuredPlan, found: Sequence[Change], seconds: float, as_json: bool) -> None:
    dead = [one for one in found if one.after is None]
    moved = [one for one in found if one.after is not None]
    fullest = max((gain.after for gain in made.gains), default=0.0)
    if as_json:
        emit_json(
            {
                "schema": SCHEMA_NAME,
                "wall_s": time.time(),
                "took_s": seconds,
                "dead": [{"destination": one.destination, "port": one.path[0], "source_port": one.path[1]} for one in dead],
                "rerouted_by_the_network": [
                    {"destination": one.destination, "port": one.path[0], "source_port": one.path[1],
                     "before": list(one.before), "after": list(one.after or ())}
                    for one in moved
                ],
                "connections": [
                    {"rank": d.rank, "peer": d.peer, "source": d.source, "destination": d.destination, "port": d.port,
                     "source_port": None if one is None else one.source_port, "hops": None if one is None else list(one.hops)}
                    for d, one in zip(made.demands, made.chosen, strict=True)
                ],
                "fullest_link": fullest,
            },
            indent=None,
        )  # fmt: skip
    else:
        for one in moved[:8]:
            emit(f"rerouted by the network itself: source port {one.path[1]}, {route(one.before)}  ⇒  {route(one.after or ())}")
        if len(moved) > 8:
            emit(f"… and {len(moved) - 8} more source ports")
        if dead:
            emit(f"dead: {len(dead)} source ports do not arrive any more ({clean(route(dead[0].before))})")
        emit(f"plan written in {seconds:.2f} s: {fullest:.3g} flows on the fullest link" if found else "plan written")
    flush()
