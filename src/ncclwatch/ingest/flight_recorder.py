"""PyTorch's Flight Recorder: the collectives that each rank of a job called last, dumped when a watchdog fires.

One file a rank, with the rank at the end of its name: ``TORCH_FR_DUMP_TEMP_FILE`` (before that
``TORCH_NCCL_DEBUG_INFO_TEMP_FILE``) is a prefix, and PyTorch adds the rank. What can
be told from it stands in docs/flight-recorder.md.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import overload

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.gc_pause import collector_at_rest
from ncclwatch.ingest.base import Format, Ingested, IngestError, View
from ncclwatch.ingest.flight_recorder_file import bounded_time, looks_like_dump, read_dump
from ncclwatch.ingest.flight_recorder_job import FlightJob
from ncclwatch.ingest.flight_recorder_rank import LEAST_KEPT, RankDump, State, read_rank
from ncclwatch.ingest.flight_recorder_words import BEGUN, CALLED, ENDED, Wording, amend, with_lines
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.side_by_side import apart, side_by_side
from ncclwatch.text import clean, compressed

MOST_WITH_PATTERNS = 32
"""Fact: in larger jobs the engine asks few for a broken pattern of calls (``ASKED``, engine/call_order.py): fewer calls do."""
MANY_FILES, CHUNK = 64, 8
"""From so many dumps on one a CPU is read at a time, so many of them by a process before it hands them over."""
_RANK = re.compile(r"rank[_\-.]?(\d{1,7})", re.IGNORECASE)
_LAST = re.compile(r"(\d{1,7})(?=\D*$)")
_ALONE = re.compile(r"(\d{1,7})")
_NUMBER = re.compile(r"\d+")
_SUFFIX = re.compile(r"\.(json|pkl|pickle|bin|dump|trace)$", re.IGNORECASE)


def rank_of(path: Path) -> tuple[str, int] | None:
    """The job's part of a file's name, and the rank: ``("nccl_trace_rank_", 3)``. Of files that are called alike for all ranks it
    is in the name of the folder (``rank_3/trace``, ``3/trace``). ``None`` where neither names a rank.
    """
    name, folder = path.name, path.parent.name
    if (found := _RANK.search(name) or _LAST.search(_SUFFIX.sub("", name))) is not None:
        return name[: found.start(1)] + "*" + name[found.end(1) :], int(found[1])
    if (found := _RANK.search(folder) or _ALONE.fullmatch(folder)) is not None:
        return f"{folder[: found.start(1)]}*{folder[found.end(1) :]}/{name}", int(found[1])
    return None


class FlightRecorder(Format):
    """Dumps of the Flight Recorder."""

    name = "flight-recorder"
    what = "PyTorch Flight Recorder dump"

    def recognises(self, head: bytes, path: Path) -> bool:
        """By the keys of a dump near the beginning of a pickle or of a JSON object."""
        return looks_like_dump(head)

    def read(self, files: Sequence[Path]) -> Sequence[Ingested]:
        """One job for each prefix of names; of equal names in several folders one job where their ranks differ."""
        unnamed = [file for file in files if rank_of(file) is None]
        problems = [f"{clean(str(file), 160)}: its name has no rank" for file in unnamed]
        # The collector would walk the rows of all ranks, over and over.
        with collector_at_rest():
            read = [_read_job(prefix, ranks) for prefix, ranks in _jobs(files)]
        found = [ingested for ingested in read if isinstance(ingested, Ingested)]
        problems += [line for lines in read if not isinstance(lines, Ingested) for line in lines]
        if not found:
            raise IngestError(problems[0] if problems else "no Flight Recorder dump", "name the dumps of every rank")
        first = found[0]
        return [_with_problems(first, problems), *found[1:]]


def _jobs(files: Sequence[Path]) -> Iterator[tuple[str, dict[int, Path]]]:
    by_prefix: dict[str, list[tuple[int, Path]]] = defaultdict(list)
    for file in files:
        named = rank_of(file)
        if named is not None:
            by_prefix[named[0]].append((named[1], file))
    for prefix, found in sorted(_over_hosts(by_prefix).items()):
        if _differ(found):
            yield prefix, dict(found)
            continue
        by_folder: dict[Path, dict[int, Path]] = defaultdict(dict)
        for rank, file in found:
            by_folder[file.parent].setdefault(rank, file)
        for folder, ranks in sorted(by_folder.items()):
            yield f"{folder.name}/{prefix}", ranks


def _over_hosts(by_prefix: Mapping[str, list[tuple[int, Path]]]) -> dict[str, list[tuple[int, Path]]]:
    """Prefixes that hold the name of a host or a time as one: alike but for their numbers, with no rank twice. Two jobs would
    both have a rank 0.
    """
    kin: dict[str, list[str]] = defaultdict(list)
    for prefix in by_prefix:
        kin[_NUMBER.sub("#", prefix)].append(prefix)
    jobs: dict[str, list[tuple[int, Path]]] = {}
    for name, prefixes in kin.items():
        together = [one for prefix in prefixes for one in by_prefix[prefix]]
        if len(prefixes) > 1 and _differ(together):
            jobs[name] = together
        else:
            jobs |= {prefix: by_prefix[prefix] for prefix in prefixes}
    return jobs


def _differ(found: Sequence[tuple[int, Path]]) -> bool:
    """Whether no rank is there twice."""
    return len({rank for rank, _ in found}) == len(found)


def _with_problems(ingested: Ingested, problems: Sequence[str]) -> Ingested:
    return replace(ingested, problems=(*ingested.problems, *problems)) if problems else ingested


def _read_job(prefix: str, files: dict[int, Path]) -> Ingested | list[str]:
    ranks: list[RankDump] = []
    problems: list[str] = []
    lists: dict[tuple[int, ...], tuple[int, ...]] = {}
    work = partial(_read_rank, least=LEAST_KEPT if len(files) <= MOST_WITH_PATTERNS else 0)
    named = sorted(files.items())
    # What is hostile may take its process with it.
    many = len(named) >= MANY_FILES
    for found in side_by_side(work, named, chunk=CHUNK, lost=_lost) if many else apart(work, named, _lost):
        if isinstance(found, IngestError):
            problems.append(str(found))
            continue
        # Another process shares no list of members with this one: those of a thousand ranks would be a thousand.
        found.members = {name: lists.setdefault(members, members) for name, members in found.members.items()}
        ranks.append(found)
    return ingested_of(FlightJob(ranks, {*files} - {one.rank for one in ranks}), prefix, problems) if ranks else problems


def _read_rank(named: tuple[int, Path], least: int) -> RankDump | IngestError:
    rank, file = named
    try:
        # The collector would walk all that a dump holds.
        with collector_at_rest(), bounded_time(file):
            return read_rank(read_dump(file), rank, least)
    except IngestError as error:
        return error


def _lost(named: tuple[int, Path], code: int) -> IngestError:
    """What is told of a dump that ended the process which read it."""
    name = clean(str(named[1]), 160)
    if code == -signal.SIGXCPU:
        return IngestError(f"{name}: it takes longer to read than a dump of its size", "it was made to, or is damaged")
    return IngestError(
        f"{name}: the process that read it ended (exit code {code})", "it ran out of memory, or the file was made to end it"
    )


def ingested_of(job: FlightJob, prefix: str, problems: Sequence[str] = (), notes: Sequence[str] = ()) -> Ingested:
    """A job as batches, with its views."""
    views = []
    if job.begun_known:
        views.append(replace(_view(job, State.STARTED, BEGUN), over=_by_host))
    if job.ended_known and not job.partial:
        views.append(_view(job, State.COMPLETED, ENDED))
    return Ingested(
        batches=_Batches(job, State.SCHEDULED), problems=tuple(problems), blind=tuple(_blind(job)),
        notes=(*_notes(job, prefix), *notes), job=prefix, source=job, stages=False, slowness=False, depth=job.depth,
        views=tuple(views), large=len(job.ranks) >= MANY_FILES,
        amend=partial(amend, job, CALLED), finish=partial(with_lines, job),
    )  # fmt: skip


def _view(job: FlightJob, least: State, words: Wording) -> View:
    return View(_Batches(job, least), partial(amend, job, words), in_order=False)


def _by_host(verdict: Verdict) -> bool:
    """Who has not called something may wait on the GPU for a call that was made: what has begun tells more. That calls differ, or
    that one was left out, only calls tell.
    """
    return verdict.verdict_class is VerdictClass.NOT_ENTERED and not {"calls-differ", "left-out"} & {*verdict.rules}


class _Batches(Sequence[NodeBatch]):
    """Batches of a job that are made when they are asked for, one after the other: those of a thousand ranks are large."""

    def __init__(self, job: FlightJob, least: State) -> None:
        self._job, self._least = job, least

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[NodeBatch]:
        return self._job.batches(self._least)

    @overload
    def __getitem__(self, at: int) -> NodeBatch: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[NodeBatch]: ...
    def __getitem__(self, at: int | slice) -> NodeBatch | Sequence[NodeBatch]:
        return tuple(self)[at]


def _blind(job: FlightJob) -> Iterator[str]:
    if unwritten := sorted({*job.missing} - {*job.unread}):
        yield f"no dump of rank{'s' if len(unwritten) > 1 else ''} {compressed(unwritten)}"
    if job.unread:
        yield f"the dump of rank{'s' if len(job.unread) > 1 else ''} {compressed(job.unread)}, which could not be read"
    if job.partial:
        yield f"what GPUs have begun and ended on rank{'s' if len(job.partial) > 1 else ''} {compressed(job.partial)}: no dump"
    if not job.ended_known:
        yield "which operations have ended: no entry says so (gloo's never do), so that all may be open"
    elif not job.begun_known:
        yield "which operations the GPUs have begun: the job ran without TORCH_NCCL_ENABLE_TIMING"
    yield "operations in captured CUDA graphs: PyTorch does not record them"
    yield "whether ranks were dumped at one moment: a dump does not say when it was written"


def _notes(job: FlightJob, prefix: str) -> Iterator[str]:
    dumps = [one for one in job.ranks if not one.partial]
    versions = sorted({one.version for one in dumps})
    libraries = sorted({f", library {one.library}" for one in dumps if one.library})
    ranks = compressed(one.rank for one in dumps)
    yield f"Flight Recorder dumps {prefix}: ranks {ranks}, format {', '.join(versions)}{''.join(libraries)}"
