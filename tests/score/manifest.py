"""Sets of recordings that are too large to keep: what they are made of, and what was said of them.

``python -m score.manifest FOLDER --to FILE`` judges the recordings that ``score --real --save FOLDER`` wrote and lists them:
scenario (of a drawn one seed and number), release, transport, attachment, whether the fault shows, what is wrong, and a hash of
what was said in which order. ``--against FILE`` judges them and says what has changed since. Played again by the commands that
the list gives, a job is another one: real processes are never the same twice. The list says what to expect.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from ncclwatch.simulate.scenario import load_all
from score.__main__ import SCENARIOS
from score.archive import batches_of, beside, dumped, name_of, recordings_in, timeline_of, wrongs
from score.keep import kept_of, scenario_of
from score.real import Saved
from score.seeds import generator_hash


@dataclass(frozen=True, slots=True)
class Entry:
    """One recording. ``wrong`` are the kinds of what is wrong with its timeline, ``timeline`` a hash of what was said."""

    scenario: str
    nccl: str
    transport: str
    attach: str
    seed: int
    number: int
    visible: bool | None
    wrong: tuple[str, ...]
    timeline: str

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What tells it from others."""
        return self.scenario, self.nccl, self.transport, self.attach, self.number


def entry(path: Path) -> Entry | None:
    """Judge a recording as it was saved; None for one of no known scenario."""
    saved = Saved.load(path)
    scenario = scenario_of(saved.scenario, {one.name: one for one in load_all(SCENARIOS)})
    if scenario is None:
        return None
    batches = batches_of(path)
    kept = kept_of(saved, scenario, batches)
    timeline = timeline_of(batches, kept.since)
    return Entry(
        saved.scenario, saved.nccl, str(saved.transport), str(saved.attach), saved.seed, saved.number, kept.visible,
        tuple(sorted(wrongs(kept, timeline))), timeline.digest,
    )  # fmt: skip


def commands(entries: Sequence[Entry]) -> list[str]:
    """The commands that play such a set again (as root)."""
    found = set()
    for one in entries:
        words = one.scenario.split("-")
        slow = words[1] == "slow"
        if words[0] == "drawn":
            largest = max(int(e.scenario.split("-")[3 if slow else 2]) for e in entries if _same_draw(e, one)) + 1
            kind = " --slow" if slow else ""
            found.add(f"python -m score --real --drawn {largest}{kind} --seed {words[2 if slow else 1]} --save FOLDER")
        else:
            found.add(
                f"python -m score --real --set full --only {one.scenario} --nccl {one.nccl} --transport {one.transport} "
                f"--seed {one.seed} --save FOLDER"
            )
    return sorted(found)


def _same_draw(one: Entry, other: Entry) -> bool:
    first, second = one.scenario.split("-"), other.scenario.split("-")
    length = 3 if first[:2] == ["drawn", "slow"] else 2
    return first[0] == "drawn" and first[:length] == second[:length]


def changes(before: Sequence[Entry], now: Sequence[Entry]) -> list[str]:
    """What is judged otherwise than it was, a line for each."""
    known = {one.key: one for one in before}
    lines = []
    for one in now:
        was = known.get(one.key)
        name = " ".join(map(str, one.key))
        if was is None:
            lines.append(f"NEW     {name}: {', '.join(one.wrong) or 'right'}")
        elif was.wrong != one.wrong:
            lines.append(
                f"{'MENDED ' if not one.wrong else 'WRONG  '} {name}: {', '.join(one.wrong) or 'right'}, was {was.wrong}"
            )
        elif was.timeline != one.timeline:
            lines.append(f"CHANGED {name}")
    return lines


def load(path: Path) -> list[Entry]:
    """The entries of a list."""
    data = json.loads(path.read_text("utf-8"))["recordings"]
    return [Entry(**(one | {"wrong": tuple(one["wrong"])})) for one in data]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 when something is judged otherwise than the list says."""
    parser = argparse.ArgumentParser(prog="score.manifest", description="List a folder of recordings and what is said of them.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--to", type=Path, metavar="FILE", help="write the list")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with a list")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    paths = [path for path in recordings_in(options.folder) if beside(path, ".json").exists()]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        found = dict(zip(map(name_of, paths), pool.map(entry, paths), strict=True))
    for name in (name for name, one in found.items() if one is None):
        print(f"{name}: of no known scenario", file=sys.stderr)
    entries = [one for one in found.values() if one is not None]
    wrong = sum(bool(one.wrong) for one in entries)
    print(f"{len(entries)} recordings, {wrong} with something wrong in their timelines")
    if options.to:
        data = {"generator": generator_hash(), "commands": commands(entries), "recordings": [asdict(one) for one in entries]}
        options.to.write_text(dumped(data), "utf-8")
    lines = changes(load(options.against), entries) if options.against else []
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
