"""Files that a plan is made of, in any order: flow maps, probes, verdicts, recordings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ncclwatch.cli.paths_files import MAP_SCHEMA, FlowMap, map_of, measured, newest, schema_of
from ncclwatch.errors import UsageError
from ncclwatch.model import verdict as verdicts
from ncclwatch.model.paths import Probe
from ncclwatch.paths import probed
from ncclwatch.paths.measured import MeasuredFlow
from ncclwatch.paths.suspects import Told, told_by
from ncclwatch.text import clean

ATTACH_SCHEMA = "ncclwatch.attach/1"
HINT = "give output of 'paths --json', 'paths probe -o FILE' and 'diagnose --json', or recordings"


@dataclass(slots=True)
class Inputs:
    """What files say together: flows whose five-tuple is known, the newest probes, and what verdicts tell of links."""

    flows: list[MeasuredFlow] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def inputs_of(files: Sequence[Path]) -> Inputs:
    """Everything that these files hold. Raises :class:`UsageError` for a file of another kind."""
    from ncclwatch.store.container import is_recording

    recordings = [file for file in files if is_recording(file)]
    maps: list[FlowMap] = []
    found = Inputs()
    if recordings:
        maps.append(_recorded(recordings, found))
    for file in (one for one in files if one not in recordings):
        data, name = probed.read_bytes(file), str(file)
        line = data.partition(b"\n")[0]
        schema = schema_of(line if b'"type"' in line else data, file)
        if schema == MAP_SCHEMA:
            maps.append(map_of(data, file))
        elif schema == probed.SCHEMA:
            found.probes += probed.read(data, name)
        elif schema == verdicts.SCHEMA_NAME:
            found.told += told_by(msgspec.json.decode(data), name)
        elif schema == ATTACH_SCHEMA:
            found.told += [told for one in _standing(data, file) for told in told_by(one, name)]
        else:
            raise UsageError(f"{clean(name)} is nothing that a plan is made of", HINT)
    found.flows, found.probes = measured(maps), newest(found.probes)
    return found


def _standing(data: bytes, file: Path) -> Iterator[dict[str, Any]]:
    """Verdicts that stand at the end of what ``attach --json`` wrote; a line that is cut off is left."""
    standing: dict[str, dict[str, Any]] = {}
    for line in data.splitlines():
        try:
            said = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            continue
        verdict = said.get("verdict") if isinstance(said, dict) else None
        if not isinstance(verdict, dict):
            continue
        if said.get("type") == "verdict":
            standing[str(verdict.get("id"))] = verdict
        elif said.get("type") == "recovery":
            standing.pop(str(verdict.get("id")), None)
    if not standing:
        raise UsageError(f"{clean(str(file))} holds no verdict that stands at its end", "leave it out")
    yield from standing.values()


def _recorded(files: Sequence[Path], found: Inputs) -> FlowMap:
    """Flows of recordings; their probes, and what the verdicts at their end tell of links, are added."""
    from ncclwatch.cli.output import plain
    from ncclwatch.cli.paths import recorded, to_json
    from ncclwatch.paths.flow_map import flow_map
    from ncclwatch.store.replay import Recordings, Replay

    views, problems = recorded(files)
    with Recordings(files) as recordings:
        replay = Replay(recordings)
        for _ in replay.updates():
            pass
        found.probes += replay.network.ways.probes.values()
        found.told += [told for verdict in replay.verdicts for told in told_by(verdict.to_json(), str(files[0]))]
    found.notes += problems
    return msgspec.convert(plain(to_json(flow_map(views), [])), FlowMap)
