"""``ncclwatch paths follow``: keep looking at this host's paths, and write a new plan as soon as one of them changes or dies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ncclwatch.cli.options import JsonOption
from ncclwatch.cli.output import emit, emit_json, flush
from ncclwatch.cli.paths_probe import route, write
from ncclwatch.errors import NcclwatchError, UsageError
from ncclwatch.model.paths import Protocol
from ncclwatch.stopping import stop_on_signals
from ncclwatch.text import clean

if TYPE_CHECKING:
    from ncclwatch.model.paths import Hops, PathKey, Probe
    from ncclwatch.paths.measured import MeasuredFlow
    from ncclwatch.paths.measured_plan import MeasuredPlan

Kept = dict[tuple[str, int, str, int], int]
"""(source, rank, destination, port) → source port."""
WAIT_S = 0.1
"""Patience with one answer while nothing but speed matters: a path that is silent is looked at again at once."""


@dataclass(frozen=True, slots=True)
class Change:
    """What became of a source port's path. ``after`` is None where it does not arrive any more."""

    destination: str
    path: PathKey
    before: Hops
    after: Hops | None


def follow(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Flow maps and probes, as of 'paths plan'; also of other hosts.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The plan, written anew when it changes.")],
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="FILE", help="What was seen, anew with each plan: for --paths of 'attach' and 'agent'."),
    ] = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=60.0, help="Seconds between two looks.")] = 0.5,
    duration: Annotated[
        float | None, typer.Option("--duration", "-d", min=0.1, max=1e8, help="Seconds after which to end.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Look at this host's paths twice a second; where one changes or dies, write a new plan of this host's ports at once.

    What the network reroutes by itself is said apart. Connections that exist stay: the next communicator takes the new ports.
    """
    from ncclwatch.cli.paths_inputs import inputs_of

    given = inputs_of(files)
    flows, probes = given.flows, given.probes
    mine = [one for one in probes if one.protocol is Protocol.TCP and _is_here(one)]
    if not mine or not flows:
        raise UsageError(
            "these files hold no probe from this host over TCP, or no flow", "run 'ncclwatch paths probe -o FILE' here first"
        )
    stop = stop_on_signals()
    ends = time.monotonic() + (duration or 1e9)
    keeper = Keeper(flows, probes, {one.source for one in mine}, output)
    _say(keeper.publish(), [], 0.0, as_json)
    keeper.keep(keep)
    while not stop.wait(max(0.0, min(interval, ends - time.monotonic()))) and time.monotonic() < ends:
        began = time.monotonic()
        changes = keeper.look()
        if changes:
            _say(keeper.publish(), changes, time.monotonic() - began, as_json)
            keeper.keep(keep)


def _is_here(probe: Probe) -> bool:
    from ncclwatch.pathprobe.look import own_address

    try:
        return own_address(probe.destination) == probe.source
    except NcclwatchError:
        return False


class Keeper:
    """What is known of all paths, and the plan that stands for this host's addresses."""

    def __init__(self, flows: Sequence[MeasuredFlow], probes: Sequence[Probe], sources: set[str], output: Path) -> None:
        self._flows = flows
        self._probes = list(probes)
        self._sources = sources
        self._output = output
        self._kept: Kept = {}
        asked = {(one.source, one.destination, *seen.path) for one in probes for seen in one.paths if seen.live}
        self._followed = [f for f in flows if (f.source, f.destination, f.port, f.source_port) in asked]

    def look(self) -> list[Change]:
        """What has changed since the look before: of paths that differ, or are silent, a second look decides."""
        from ncclwatch.pathprobe import hops, look
        from ncclwatch.paths.probed import remembered

        found = []
        for number, probe in enumerate(self._probes):
            if probe.source not in self._sources or probe.protocol is not Protocol.TCP:
                continue
            asked = [seen.path for seen in probe.paths if not seen.live]
            effort = hops.Effort(1, WAIT_S, max((len(seen.hops) for seen in probe.paths), default=0) + 1)
            before = {seen.path: seen for seen in probe.paths}
            seen_now = hops.traces(probe.destination, asked, Protocol.TCP, effort)
            if all(_same(before[one.path].hops, before[one.path].arrived, one) for one in seen_now):
                continue
            again = look.Asked(probe.destination, asked, looks=2, apart_s=WAIT_S / 2, effort=effort)
            fresh = look.look(again, probe.host, seen_now)
            found += changes(probe, fresh)
            # What is known of running flows is of before: it is not true any more.
            self._probes[number] = remembered(probe, fresh)
        return found

    def keep(self, file: Path | None) -> None:
        """Write what is known of this host's paths. Running flows are followed anew: that may wait until the plan is written."""
        from ncclwatch.paths.probed import SCHEMA, ProbeFile

        if file is not None:
            mine = [self._with_flows(one) for one in self._probes if one.source in self._sources]
            write(file, msgspec.json.encode(ProbeFile(SCHEMA, tuple(mine))))

    def _with_flows(self, probe: Probe) -> Probe:
        from ncclwatch.model.paths import SeenPath
        from ncclwatch.pathprobe import segments

        own = tuple(seen for seen in probe.paths if not seen.live)
        hops = max((len(seen.hops) for seen in own if seen.arrived), default=0)
        live = [flow for flow in self._followed if (flow.source, flow.destination) == (probe.source, probe.destination)]
        if not live or not hops or ":" in probe.source:
            return probe
        try:
            found = segments.traces(probe.source, probe.destination, [(flow.port, flow.source_port) for flow in live], hops)
        except NcclwatchError as error:
            return replace(probe, notes=(*probe.notes[:8], str(error)))
        return replace(probe, paths=own + tuple(SeenPath(*one.path, hops=one.hops, arrived=True, live=True) for one in found))

    def publish(self) -> MeasuredPlan:
        """Plan anew, keep what may stay, and write what leaves by this host's addresses."""
        from ncclwatch.cli.paths_files import pins_of
        from ncclwatch.paths.measured_plan import plan

        made = plan(self._flows, self._probes, floor=0.0, kept=self._kept)
        pairs = list(zip(made.demands, made.chosen, strict=True))
        self._kept = {(d.source, d.rank, d.destination, d.port): one.source_port for d, one in pairs if one is not None}
        write(self._output, pins_of(made.demands, made.chosen, self._sources).encode())
        return made


def _same(before: Hops, arrived: bool, now: Any) -> bool:
    from ncclwatch.paths.probed import alike

    return bool(now.reason) or (now.arrived == arrived and alike(before, now.hops))


def changes(before: Probe, after: Probe) -> list[Change]:
    """Source ports whose path is another one, or does not arrive any more."""
    from ncclwatch.paths.probed import alike

    old = {seen.path: seen for seen in before.paths if not seen.live}
    found = []
    for seen in after.paths:
        was = old.get(seen.path)
        if was is not None and not (was.arrived == seen.arrived and alike(was.hops, seen.hops)):
            found.append(Change(before.destination, seen.path, was.hops, seen.hops if seen.arrived else None))
    return found


def _say(made: MeasuredPlan, found: Sequence[Change], seconds: float, as_json: bool) -> None:
    dead = [one for one in found if one.after is None]
    moved = [one for one in found if one.after is not None]
    fullest = max((gain.after for gain in made.gains), default=0.0)
    if as_json:
        emit_json(
            {
                "schema": "ncclwatch.pathfollow/1",
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
