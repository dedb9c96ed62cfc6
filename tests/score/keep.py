"""Keep recordings of real runs as fixtures: ``python -m score.keep RECORDING... --to FOLDER --what TEXT``.

What names the machine they were made on (paths, commands, notes, its other network devices) is left out; what the engine judges
stays as it was recorded. Beside each lies what it must be judged as, which is taken from the scenario's expectation.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.model.network import NetworkLook
from ncclwatch.model.state import ProcessSample
from ncclwatch.simulate.scenario import Scenario, ScoreClass, load_all
from ncclwatch.store.replay import Recordings
from score.__main__ import SCENARIOS
from score.diagnosers import HANG_CLASSES
from score.drawn import draw
from score.real import Recording, Saved, Transport, as_played, vary

PROGRAM, LIBRARY = "train", "libnccl.so.2"
LONGEST_S = 12.0
"""A hang is told after that, and the recording may end."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a fixture is of and must be judged as. Without ``verdicts`` nobody may be accused; of a fault, ``ranks`` and nobody
    who is not in ``also`` either.
    """

    about: str
    nccl: str
    transport: str
    attach: str
    verdicts: tuple[str, ...]
    ranks: tuple[int, ...]
    also: tuple[int, ...] = ()


def anonymous(batch: NodeBatch) -> NodeBatch:
    """The batch without what names the machine."""
    network = batch.network
    if network is not None:
        nics = tuple(nic for nic in network.nics if nic.used_by)
        network = NetworkLook(nics=nics, flows=network.flows)
    return msgspec.structs.replace(
        batch, samples=tuple(_anonymous(sample) for sample in batch.samples), changes=(), notes=(), planes=(), problems=(),
        overhead=None, network=network,
    )  # fmt: skip


def _anonymous(sample: ProcessSample) -> ProcessSample:
    return replace(sample, process=replace(sample.process, name=PROGRAM, command=(PROGRAM,), library=LIBRARY, container_id=""))


def keep(path: Path, scenario: Scenario, about: str, folder: Path) -> Path:
    """Write one recording and what it must be judged as into a folder. Raises OSError and NcclwatchError."""
    saved = Saved(**json.loads(path.with_suffix(".json").read_text("utf-8")))
    played = as_played(vary(scenario, saved.seed, saved.number), saved.nccl, Transport(saved.transport))
    expect = played.expect
    accused = expect.score_class is not ScoreClass.CLEAN
    kept = Kept(
        about, saved.nccl, str(saved.transport), str(saved.attach), tuple(map(str, expect.verdicts)) if accused else (),
        expect.ranks, expect.also,
    )  # fmt: skip
    with Recordings([path]) as recordings:
        batches = [anonymous(batch) for _, _, batch in recordings.batches()]
    if expect.score_class in HANG_CLASSES and saved.attach != "post-hang":
        batches = [batch for batch in batches if batch.time_ns / 1e9 <= saved.since + LONGEST_S]
    target = folder / path.name
    Recording(batches).save(target)
    target.with_suffix(".json").write_text(json.dumps(asdict(kept), indent=1) + "\n", "utf-8")
    return target


def main() -> int:
    """Exit status 0, 1 when a recording is of no known scenario."""
    parser = argparse.ArgumentParser(prog="score.keep", description="Keep recordings of real runs as fixtures.")
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--what", default="", help="what is remarkable about it, for the file beside it")
    options = parser.parse_args()
    known = {scenario.name: scenario for scenario in load_all(SCENARIOS)}
    for path in options.recordings:
        name = json.loads(path.with_suffix(".json").read_text("utf-8"))["scenario"]
        if name.startswith("drawn-"):
            seed, number = map(int, name.split("-")[1:3])
            known[name] = draw(seed, number)
        if name not in known:
            print(f"{path}: no scenario is called {name}", file=sys.stderr)
            return 1
        made = keep(path, known[name], options.what or known[name].title, options.to)
        print(f"{made}: {made.stat().st_size >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
