"""What ``paths follow`` keeps: the paths of this host, the plan that stands for its addresses, and how to take that back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ncclwatch.cli.paths_files import pins_of
from ncclwatch.cli.paths_probe import write
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.paths import Hops, PathKey, Probe, Protocol, SeenPath
from ncclwatch.paths.measured import MeasuredFlow
from ncclwatch.paths.measured_plan import MeasuredPlan, plan
from ncclwatch.paths.pins import MAX_BYTES, plan_text
from ncclwatch.paths.probed import SCHEMA, ProbeFile, alike, remembered
from ncclwatch.paths.suspects import Told
from ncclwatch.paths.trial import Fall, Trial

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


class Keeper:
    """What is known of all paths, and the plan that stands for this host's addresses."""

    def __init__(
        self, flows: Sequence[MeasuredFlow], probes: Sequence[Probe], sources: set[str], output: Path, told: Sequence[Told] = ()
    ) -> None:
        self._flows = flows
        self._probes = list(probes)
        self._sources = sources
        self._output = output
        self._told = told
        self._text = _plan_at(output)
        self._before = plan_text((), ())
        self._trial = Trial(())
        self._kept: Kept = {}
        asked = {(one.source, one.destination, *seen.path) for one in probes for seen in one.paths if seen.live}
        self._followed = [f for f in flows if (f.source, f.destination, f.port, f.source_port) in asked]

    def look(self) -> list[Change]:
        """What has changed since the look before: of paths that differ, or are silent, a second look decides."""
        from ncclwatch.pathprobe import hops, look

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

        if file is not None:
            mine = [self._with_flows(one) for one in self._probes if one.source in self._sources]
            write(file, msgspec.json.encode(ProbeFile(SCHEMA, tuple(mine))))

    def _with_flows(self, probe: Probe) -> Probe:
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

        made = plan(self._flows, self._probes, floor=0.0, kept=self._kept, told=self._told)
        pairs = list(zip(made.demands, made.chosen, strict=True))
        self._kept = {(d.source, d.rank, d.destination, d.port): one.source_port for d, one in pairs if one is not None}
        text = pins_of(made.demands, made.chosen, self._sources)
        if text != self._text:
            self._before, self._text = self._text, text
        write(self._output, text.encode())
        # Rates of before a path changed say nothing of the plan that came after.
        self._trial = Trial({(d.source, one.source_port, d.destination, d.port) for d, one in pairs if one is not None})
        return made

    @property
    def compares_with(self) -> float | None:
        """Bytes a second of the slowest flow before the plan was taken; ``None`` until that was seen often enough."""
        return self._trial.compares_with

    def judge(self, flows: Sequence[MeasuredFlow]) -> Fall | None:
        """Compare the rates of this host's flows with those before they took the plan; where they fell take the plan back."""
        fall = self._trial.look([one for one in flows if one.source in self._sources])
        if fall is not None:
            self._text = self._before
            self._kept = {}
            write(self._output, self._text.encode())
        return fall


def _plan_at(path: Path) -> str:
    """The plan that is there already; one that says nothing where there is none, or anything else."""
    empty = plan_text((), ())
    try:
        text = path.read_bytes()[: MAX_BYTES + 1].decode()
    except (OSError, UnicodeDecodeError):
        return empty
    return text if text.startswith(empty) and len(text) <= MAX_BYTES else empty


def _same(before: Hops, arrived: bool, now: Any) -> bool:
    return bool(now.reason) or (now.arrived == arrived and alike(before, now.hops))


def changes(before: Probe, after: Probe) -> list[Change]:
    """Source ports whose path is another one, or does not arrive any more."""
    old = {seen.path: seen for seen in before.paths if not seen.live}
    found = []
    for seen in after.paths:
        was = old.get(seen.path)
        if was is not None and not (was.arrived == seen.arrived and alike(was.hops, seen.hops)):
            found.append(Change(before.destination, seen.path, was.hops, seen.hops if seen.arrived else None))
    return found
