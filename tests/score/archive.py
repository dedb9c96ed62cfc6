"""The archive of kept recordings: how they are stored, and the timeline of everything that was said of each.

``python -m score.archive`` judges every recording of ``tests/fixtures/jobs`` as the engine judges now and says what is wrong with
its timeline and what differs from the frozen one beside it; ``--freeze`` writes the timelines anew, ``--accept REASON`` also
enters what is wrong as known to be.

A recording ``NAME.ncclwatch`` or ``NAME.ncclwatch.xz`` has beside it ``NAME.json`` (:class:`Kept`: what it must be judged as) and
``NAME.timeline.json`` (:class:`Timeline`: what was said at every look, equal looks merged).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.messaging import packing
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.store.container import Header, Kind, pack_frame, pack_header
from ncclwatch.store.replay import Recordings

JOBS = Path(__file__).resolve().parent.parent / "fixtures" / "jobs"
PLAIN, PACKED = ".ncclwatch", ".ncclwatch.xz"
ROUND_S = 1
"""Digits of the times of a timeline, seconds: looks are about a second apart."""
BY_LINES = frozenset({"said", "recordings"})
"""Entries of a JSON file whose items have a line each."""
UNKNOWN_RANK = -1
"""A culprit of whom only a rank in a communicator is said, and not which of the job's ranks that is."""


# --- recordings as files ---------------------------------------------------------------------------------------------------


def by_process(batch: NodeBatch) -> NodeBatch:
    """The batch with its calls process by process, each in its order. Which of two processes called first is in their times; the
    order of the ring is not judged, and takes half the bytes (``score.keep`` checks that the timeline is the same).
    """
    if batch.events is None:
        return batch
    return msgspec.structs.replace(batch, events=batch.events[np.argsort(batch.events["pid"], kind="stable")])


def store(batches: Iterable[NodeBatch], path: Path) -> None:
    """Write batches as one compressed recording. Batches are not compressed one by one but all together: that takes a third."""
    writer = BatchWriter(calls="ledger")
    frames = [pack_header(Header(0, 0, 0)), pack_frame(Kind.META, b"{}", segment=1, time_ns=0, key=True)]
    for batch in map(by_process, batches):
        body, key = packing.unframe(writer.encode(batch))
        data = packing.frame(body, key=key, level=0)
        frames.append(pack_frame(Kind.BATCH, data, segment=1, time_ns=batch.wall_ns, key=key))
    path.write_bytes(lzma.compress(b"".join(frames), preset=9))


@contextmanager
def opened(path: Path) -> Iterator[Recordings]:
    """A recording of the archive, or any other."""
    if path.suffix != ".xz":
        with Recordings([path]) as recordings:
            yield recordings
        return
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / path.stem
        plain.write_bytes(lzma.decompress(path.read_bytes()))
        with Recordings([plain]) as recordings:
            yield recordings


def batches_of(path: Path) -> list[NodeBatch]:
    """All batches of a recording, in order."""
    with opened(path) as recordings:
        return [batch for _, _, batch in recordings.batches()]


def name_of(path: Path) -> str:
    """The recording's name without its endings."""
    return path.name.removesuffix(PACKED).removesuffix(PLAIN)


def recordings_in(folder: Path) -> list[Path]:
    """The recordings of a folder by name."""
    return sorted([*folder.glob("*" + PLAIN), *folder.glob("*" + PACKED)], key=name_of)


# --- what a recording must be judged as ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kept:
    """What a recording is of and must be judged as. Without ``verdicts`` the job is healthy and nobody may be accused; of a
    fault, all ``ranks`` are named in the end, and nobody who is not among them or in ``also`` is named at any moment.

    ``since``: when the fault began to show to this collector, seconds of CLOCK_MONOTONIC there; ``since_from`` says how that is
    known. ``visible`` (of slow jobs): whether the fault shows in the job's own iteration times (:mod:`score.visible`); where it
    does not, silence is right. ``known_wrong`` are the ways in which the engine gets it wrong today, with the reason: the test
    fails when one of them is mended, so that the entry goes, and when another is added.
    """

    about: str
    nccl: str
    transport: str
    attach: str
    verdicts: tuple[str, ...]
    ranks: tuple[int, ...]
    also: tuple[int, ...] = ()
    since: float = 0.0
    since_from: str = ""
    visible: bool | None = None
    iterations: tuple[tuple[float, float], ...] = ()
    """What rank 0 said of each iteration: seconds it took and when it ended."""
    known_wrong: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, recording: Path) -> Kept:
        """The one beside a recording."""
        data = json.loads(beside(recording, ".json").read_text("utf-8"))
        lists = {name: tuple(data[name]) for name in ("verdicts", "ranks", "also")}
        return cls(**(data | lists | {"iterations": tuple((took, ended) for took, ended in data.get("iterations", ()))}))

    def save(self, recording: Path) -> None:
        """Write it beside a recording."""
        data = {name: value for name, value in asdict(self).items() if value not in (None, {}, (), "")}
        data |= {name: getattr(self, name) for name in ("verdicts", "ranks", "also", "since")}
        beside(recording, ".json").write_text(dumped(data), "utf-8")


def beside(recording: Path, ending: str) -> Path:
    """The file beside a recording with another ending."""
    return recording.with_name(name_of(recording) + ending)


def dumped(data: Mapping[str, Any]) -> str:
    """JSON with a line for each entry: differences stay readable."""
    lines = [f" {json.dumps(name)}: {_value(name, value)}" for name, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _value(name: str, value: Any) -> str:
    if name in BY_LINES:
        return "[\n" + ",\n".join("  " + json.dumps(item) for item in value) + "\n ]"
    return json.dumps(value)


# --- what was said ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accusation:
    """One accusing verdict: its class, the job's ranks that it names, and the ends of the link it names (or none)."""

    verdict: str
    ranks: tuple[int, ...]
    link: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stretch:
    """Looks in a row at which the same was said: times of the first and the last, seconds since the fault began to show.

    ``quiet`` is the class of the verdict where nobody was accused.
    """

    first_s: float
    last_s: float
    accused: tuple[Accusation, ...] = ()
    quiet: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Everything that was said of a recording, look by look."""

    looks: int
    stretches: tuple[Stretch, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data: (first, last, what was said) for each stretch."""
        said = [
            [s.first_s, s.last_s, s.quiet or [[a.verdict, list(a.ranks), list(a.link)] for a in s.accused]]
            for s in self.stretches
        ]
        return {"looks": self.looks, "said": said}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timeline:
        """What ``to_json`` made."""
        return cls(data["looks"], tuple(_stretch(*entry) for entry in data["said"]))

    @property
    def digest(self) -> str:
        """A short hash, for lists of recordings that are not kept. Times do not count, what was said in which order does."""
        text = json.dumps([entry[2] for entry in self.to_json()["said"]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def text(self) -> list[str]:
        """For people: a line for each stretch."""
        return [f"{s.first_s:8.1f} to {s.last_s:6.1f} s: {_words(s)}" for s in self.stretches]


def _stretch(first_s: float, last_s: float, said: str | list[list[Any]]) -> Stretch:
    if isinstance(said, str):
        return Stretch(first_s, last_s, quiet=said)
    return Stretch(first_s, last_s, tuple(Accusation(v, tuple(ranks), tuple(link)) for v, ranks, link in said))


def _words(stretch: Stretch) -> str:
    accused = (f"{a.verdict} {list(a.ranks)}" + (f" link {list(a.link)}" if a.link else "") for a in stretch.accused)
    return "; ".join(accused) or stretch.quiet


class _Ranks:
    """Which rank of the job is which of a communicator, from the samples seen so far."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], set[int]] = defaultdict(set)

    def learn(self, batch: NodeBatch) -> None:
        """Take what a batch's samples say of themselves."""
        for sample in batch.samples:
            if sample.process.rank is not None:
                for c in sample.communicators:
                    self._found[f"{c.hash:016x}", c.rank].add(sample.process.rank)

    def of(self, comm_hash: str | None, comm_rank: int | None) -> int:
        """The job's rank; unknown where nobody said it, or several did (splits before 2.24 share a hash)."""
        found = self._found.get((comm_hash or "", -1 if comm_rank is None else comm_rank), set())
        return next(iter(found)) if len(found) == 1 else UNKNOWN_RANK


def _accusation(verdict: Verdict, ranks: _Ranks) -> Accusation:
    named = {
        c.rank if c.rank is not None else ranks.of(c.communicator.hash if c.communicator else None, c.comm_rank)
        for c in verdict.culprits
    }
    link: tuple[int, ...] = ()
    if verdict.link is not None and verdict.communicator is not None:
        ends = (verdict.link.source, verdict.link.destination)
        link = tuple(ranks.of(verdict.communicator.hash, end) for end in ends)
    return Accusation(str(verdict.verdict_class), tuple(sorted(named)), link)


def timeline_of(batches: Iterable[NodeBatch], since: float) -> Timeline:
    """What a session says at each look, fed the batches as they came."""
    session, ranks = DiagnosisSession(), _Ranks()
    stretches: list[Stretch] = []
    looks = 0
    for batch in batches:
        session.feed(batch)
        ranks.learn(batch)
        if not batch.looked:
            continue
        looks += 1
        verdicts = session.judge(batch.time_ns).verdicts
        accused = tuple(sorted((_accusation(v, ranks) for v in verdicts if v.verdict_class.accuses), key=repr))
        quiet = "" if accused else str(verdicts[0].verdict_class) if verdicts else "nothing"
        at = round(batch.time_ns / 1e9 - since, ROUND_S) + 0.0  # no minus zero
        if stretches and (stretches[-1].accused, stretches[-1].quiet) == (accused, quiet):
            stretches[-1] = Stretch(stretches[-1].first_s, at, accused, quiet)
        else:
            stretches.append(Stretch(at, at, accused, quiet))
    return Timeline(looks, tuple(stretches))


# --- what is wrong with it --------------------------------------------------------------------------------------------------


def wrongs(kept: Kept, timeline: Timeline) -> dict[str, str]:
    """What is wrong with a timeline, by kind, each with the first place where it is.

    ``alarm``: a healthy job was accused; ``early``: somebody was accused before the fault showed; ``innocent``: somebody was
    named who is not at fault, at any moment; ``silent``: nobody was accused of a fault that shows; ``class`` and ``place``: the
    last accusation has the wrong class, or lacks a rank.
    """
    accusing = [stretch for stretch in timeline.stretches if stretch.accused]
    if not kept.verdicts:
        return {"alarm": _at(accusing[0])} if accusing else {}
    found: dict[str, str] = {}
    allowed = {*kept.ranks, *kept.also}
    for stretch in accusing:
        if stretch.first_s < 0 and not all(_early_and_right(kept, a, allowed) for a in stretch.accused):
            found.setdefault("early", _at(stretch))
        if any(set(a.ranks) - allowed for a in stretch.accused):
            found.setdefault("innocent", _at(stretch))
    told = [stretch for stretch in accusing if stretch.last_s >= 0]
    if not told:
        return found if kept.visible is False else found | {"silent": "nobody was accused"}
    last = told[-1]
    if not any(a.verdict in kept.verdicts for a in last.accused):
        found["class"] = _at(last)
    if not any(set(kept.ranks) <= set(a.ranks) and a.ranks for a in last.accused):
        found["place"] = _at(last)
    return found


def _early_and_right(kept: Kept, accusation: Accusation, allowed: set[int]) -> bool:
    """Calls that contradict each other are seen before the job comes to stand over them."""
    inconsistent = accusation.verdict == VerdictClass.INCONSISTENT and accusation.verdict in kept.verdicts
    return inconsistent and set(accusation.ranks) <= allowed


def _at(stretch: Stretch) -> str:
    return f"{stretch.first_s:.1f} s: {_words(stretch)}"


# --- the command --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Looked:
    """What one recording of the archive came to. ``changed``: it is not the frozen timeline any more."""

    path: Path
    kept: Kept
    timeline: Timeline
    frozen: Timeline | None

    @property
    def wrongs(self) -> dict[str, str]:
        """What is wrong with its timeline."""
        return wrongs(self.kept, self.timeline)

    @property
    def complaint(self) -> str:
        """Why the recording is not judged as it must be; empty when it is, known wrongs included."""
        found, known = self.wrongs, self.kept.known_wrong
        lines = [f"{kind}: {text}" for kind, text in found.items() if kind not in known]
        lines += [f"{kind} is known to be wrong and no longer is: take it out" for kind in known if kind not in found]
        return "; ".join(lines)

    @property
    def changed(self) -> bool:
        """Whether something else is said than was frozen."""
        return self.timeline != self.frozen


def look_at(path: Path) -> Looked:
    """Judge one recording of the archive."""
    kept = Kept.load(path)
    place = beside(path, ".timeline.json")
    frozen = Timeline.from_json(json.loads(place.read_text("utf-8"))) if place.exists() else None
    return Looked(path, kept, timeline_of(batches_of(path), kept.since), frozen)


def freeze(looked: Looked) -> None:
    """Write the timeline beside its recording."""
    beside(looked.path, ".timeline.json").write_text(dumped(looked.timeline.to_json()), "utf-8")


def accept(looked: Looked, reason: str) -> None:
    """Enter what is wrong now as known, with that reason unless there is one, and take out what no longer is."""
    known = {kind: looked.kept.known_wrong.get(kind, reason) for kind in looked.wrongs}
    replace(looked.kept, known_wrong=known).save(looked.path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when every timeline is as it must be, and as it was frozen."""
    parser = argparse.ArgumentParser(prog="score.archive", description="Judge the kept recordings and compare their timelines.")
    parser.add_argument("--folder", type=Path, default=JOBS)
    parser.add_argument("--only", default="", help="only recordings whose name contains this")
    parser.add_argument("--freeze", action="store_true", help="write the timelines anew")
    parser.add_argument("--accept", default="", metavar="REASON", help="enter what is wrong now as known to be, and freeze")
    parser.add_argument("--verbose", action="store_true", help="print the whole timeline of each that is wrong or has changed")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    chosen = [path for path in recordings_in(options.folder) if options.only in name_of(path)]
    wrong = changed = 0
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for looked in pool.map(look_at, chosen):
            name = name_of(looked.path)
            if looked.complaint:
                print(f"WRONG   {name}: {looked.complaint}")
            if looked.changed:
                print(f"CHANGED {name}" + (" (not frozen before)" if looked.frozen is None else ""))
            if options.verbose and (looked.changed or looked.complaint):
                print("\n".join(looked.timeline.text))
            wrong, changed = wrong + bool(looked.complaint), changed + looked.changed
            if options.accept:
                accept(looked, options.accept)
            if options.freeze or options.accept:
                freeze(looked)
    print(f"{len(chosen)} recordings: {wrong} not judged as they must be, {changed} timelines changed")
    return 1 if wrong or (changed and not options.freeze) else 0


if __name__ == "__main__":
    sys.exit(main())
