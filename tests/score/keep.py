"""Keep recordings of real runs in the archive: ``python -m score.keep RECORDING... --to FOLDER --what TEXT``.

What names the machine they were made on (paths, commands, notes, its other network devices) is left out; what the engine judges
stays as it was recorded. Beside each lies what it must be judged as, which is taken from the scenario's expectation, and the
timeline of what the engine says of it now (:mod:`score.archive`). Healthy and slow jobs are kept whole; of a hang that was
watched live the end is left out, when it has long been told.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.model.network import NetworkLook
from ncclwatch.model.state import ProcessInfo
from ncclwatch.simulate.scenario import Scenario, load_all
from score import nccl_choice
from score.__main__ import SCENARIOS
from score.archive import JOBS, PACKED, Kept, batches_of, beside, freeze, look_at, name_of, store, timeline_of
from score.diagnosers import HANG_CLASSES
from score.drawn import by_name
from score.real import Attach, Saved, expected
from score.visible import SLOW_CLASSES, visibility

PROGRAM, LIBRARY = "train", "libnccl.so.2"
LONGEST_S = 12.0
"""A hang is told after that, and the recording may end."""


def anonymous(batch: NodeBatch) -> NodeBatch:
    """The batch without what names the machine."""
    network = batch.network
    if network is not None:
        nics = tuple(nic for nic in network.nics if nic.used_by)
        network = NetworkLook(nics=nics, flows=network.flows)
    return msgspec.structs.replace(
        batch, samples=tuple(replace(one, process=_nameless(one.process)) for one in batch.samples),
        windows=tuple(replace(one, process=_nameless(one.process)) for one in batch.windows), changes=(), notes=(), planes=(),
        problems=(), overhead=None, network=network,
    )  # fmt: skip


def _nameless(process: ProcessInfo) -> ProcessInfo:
    traits = replace(process.traits, settings=(), kernel="") if process.traits is not None else None
    return replace(process, name=PROGRAM, command=(PROGRAM,), library=LIBRARY, container_id="", traits=traits)


def scenario_of(name: str, catalogue: Mapping[str, Scenario]) -> Scenario | None:
    """The scenario of that name: of the files, or drawn."""
    return catalogue.get(name) or by_name(name)


def kept_of(saved: Saved, scenario: Scenario, batches: Sequence[NodeBatch], about: str = "") -> Kept:
    """What a recording must be judged as, by the scenario that was played and by what the job itself said of it."""
    played = expected(scenario, saved)
    expect = played.expect
    slow = expect.score_class in SLOW_CLASSES
    until = batches[-1].time_ns / 1e9 if batches else saved.since
    late = saved.attach == Attach.POST_HANG
    return Kept(
        about or scenario.title, saved.nccl, str(saved.transport), str(saved.attach),
        () if expect.score_class.quiet else tuple(map(str, expect.verdicts)), expect.ranks, expect.also, saved.since,
        "when the collector came, after the job had come to stand" if late else "the job's own lines",
        visibility(played, saved.iterations, saved.since, until).visible if slow else None,
        tuple((took, ended) for took, ended in saved.iterations) if slow else (),
    )  # fmt: skip


def keep(path: Path, scenario: Scenario, about: str, folder: Path) -> Path:
    """Write one recording, what it must be judged as and what is said of it into a folder. Raises OSError and NcclwatchError."""
    saved = Saved.load(path)
    batches = [anonymous(batch) for batch in batches_of(path)]
    kept = kept_of(saved, scenario, batches, about)
    if scenario.expect.score_class in HANG_CLASSES and saved.attach != Attach.POST_HANG:
        batches = [batch for batch in batches if batch.time_ns / 1e9 <= saved.since + LONGEST_S]
    target = folder / (name_of(path) + PACKED)
    store(batches, target)
    kept.save(target)
    looked = look_at(target)
    if looked.timeline != timeline_of(batches, kept.since):
        raise ValueError(f"{target} is not judged as {path} is: what was left out matters")
    freeze(looked)
    if looked.wrongs:
        print(f"{name_of(path)}: known_wrong is to be filled in: {json.dumps(looked.wrongs)}", file=sys.stderr)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 when a recording is of no known scenario."""
    parser = argparse.ArgumentParser(prog="score.keep", description="Keep recordings of real runs in the archive.")
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--to", type=Path, default=JOBS, metavar="FOLDER")
    parser.add_argument("--what", default="", help="what is remarkable about it, for the file beside it")
    options = parser.parse_args(arguments)
    catalogue = {scenario.name: scenario for scenario in load_all(SCENARIOS)}
    for path in options.recordings:
        note = json.loads(beside(path, ".json").read_text("utf-8"))
        name = note["scenario"]
        scenario = scenario_of(name, catalogue) or nccl_choice.by_name(name, note["nccl"], catalogue)
        if scenario is None:
            print(f"{path}: no scenario is called {name}", file=sys.stderr)
            return 1
        made = keep(path, scenario, options.what, options.to)
        print(f"{made}: {made.stat().st_size >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
