"""MegaTrace's and VenusTrace's rank logs: ``rank_N.log``, a line a call of NCCL (:mod:`.rank_log_lines` has their form).

Their thread keeps a ring of 10,000 lines and saves it only once no call has come for a while (``NCCL_MEGATRACE_SENSTIME``,
``ring_log.cc`` of their patch). So the lines before a save may be missing, which ``opCount`` shows; and a log ends at a
standstill, or earlier than its rank did. Which of the two shows in the calls of its peers: nobody gets far without a rank that
hangs.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ncclwatch.ingest.base import Format, Ingested, IngestError, changed_ns
from ncclwatch.ingest.rank_log_groups import Found, LoggedRanks, Shared, chains_of, join
from ncclwatch.ingest.rank_log_lateness import Lateness, name_latest, name_past
from ncclwatch.ingest.rank_log_layout import HIGHEST_WORLD, Layout, beside
from ncclwatch.ingest.rank_log_lines import numbered, parse
from ncclwatch.ingest.rank_log_messages import peers
from ncclwatch.ingest.rank_log_pace import slow_groups, tell_pace, unexplained
from ncclwatch.ingest.rank_log_pauses import tell_pause
from ncclwatch.ingest.rank_log_records import ends_early, events_of, last_call_lacking
from ncclwatch.ingest.traced import SECOND, TracedRank, batches, look_times, once_a_moment, without_certainty, without_pids
from ncclwatch.model.rows import distinct
from ncclwatch.model.verdict import Verdict
from ncclwatch.text import clean, size

PART_BYTES = 4 << 20
"""Bytes that are parsed at once."""
MOST_BYTES = 1 << 29
"""Bound: bytes of all logs of a job that are read; of larger ones the newest parts."""
MOST_RANKS, MOST_NOTES = 4096, 20
MOST_STAGED = 60_000
"""Bound: lines of a job of which passes and micro-batches are learned: that takes longer than all else."""
_HEAD = re.compile(rb"^(?:\[save_count \d+\] )?\[\d+\.\d{9}\] \[Rank \d+\] Fun \w+ Data \d+ stream 0x[0-9a-fA-F]+\b", re.M)
BLIND = (
    "rank logs hold calls only: not what GPUs and proxies do, and neither hosts nor processes",
    "a call that follows the last save of a log is in no log",
)


@dataclass(slots=True)
class _Log:
    """One log: its lines, in order, and what is wrong with it. ``written_ns``: when the file was written last."""

    path: Path
    lines: NDArray[np.void]
    problems: list[str] = field(default_factory=list)
    written_ns: int = 0


class RankLogs(Format):
    """Rank logs of one job or several, a folder each."""

    name = "rank-log"
    what = "MegaTrace or VenusTrace rank log"

    def recognises(self, head: bytes, path: Path) -> bool:
        """By the form of a line."""
        return _HEAD.search(head) is not None

    def read(self, files: Sequence[Path]) -> Sequence[Ingested]:
        """A job a folder. Raises :class:`IngestError` where a folder's logs hold no line, or its ``config.yaml`` is wrong."""
        folders: dict[Path, list[Path]] = defaultdict(list)
        for file in files:
            folders[file.parent].append(file)
        return [self._job(sorted(found, key=_by_number)) for found in folders.values()]

    def _job(self, files: Sequence[Path]) -> Ingested:
        logs, problems = _read_all(files)
        if not logs:
            raise IngestError(problems[0] if problems else f"{clean(str(files[0]), 200)}: no line of a rank log", _WHAT_TO_DO)
        chains = {rank: chains_of(rank, log.lines) for rank, log in logs.items()}
        found = join(chains, beside(files))
        world, end = _world(logs, found), max(int(log.lines["time_ns"][-1]) for log in logs.values())
        known, doubt = _known_peers(found), last_call_lacking(found.shared, end)
        if doubt is not None:
            _take_out(logs, *doubt[:2])
            chains = {rank: chains_of(rank, log.lines) for rank, log in logs.items()}
            found = join(chains, found.layout)
            known = _known_peers(found)
        ranks = [
            TracedRank(rank, clean(log.path.name, 80), world, *events_of(rank, log.lines, found.shared, known))
            for rank, log in logs.items()
        ]  # fmt: skip
        for traced, early in zip(ranks, ends_early(logs_lines(logs), found.shared), strict=True):
            if early is not None:
                traced.until_ns, traced.ended = early, "its log ends while its peers go on: what it did later was not saved"
        begin = min(int(log.lines["time_ns"][0]) for log in logs.values())
        looks = look_times(begin, end, quiet_until(logs, end), len(ranks))
        notes = [*_notes(logs, found, world), *(f"{r.source}: {r.ended}" for r in ranks if r.ended)]
        if doubt is not None:
            notes.append(_doubt_text(*doubt))
        blind = [*BLIND, *(["the logs do not tell peers of sends and receives"] if known is None and _exchanges(found) else [])]
        lateness, sources = Lateness(found.shared, begin, end), {traced.rank: traced.source for traced in ranks}
        paces = unexplained(slow_groups(found.shared, found.layout, lateness.parts), lambda rank: lateness.replica[rank])
        notes += [f"{_clock(late.begin)} {late.text(found.layout)}" for late in lateness.stretches()][:MOST_NOTES]

        def amend(verdict: Verdict) -> Verdict:
            told = name_past(name_latest(verdict, lateness, found.layout, sources), lateness, found.layout, sources)
            told = tell_pause(told, lateness.pause, found.layout, sources, lateness.end)
            return without_certainty(without_pids(tell_pace(told, paces, found.layout, sources, lateness.end)))

        made, name = list(batches(ranks, looks)), clean(str(files[0].parent), 200)
        stages = sum(len(log.lines) for log in logs.values()) <= MOST_STAGED
        held = LoggedRanks(
            chains, {rank: log.path for rank, log in logs.items()}, {rank: log.written_ns for rank, log in logs.items()},
        )  # fmt: skip
        return Ingested(made, problems, blind, notes, job=name, source=held, stages=stages, amend=once_a_moment(amend))


_WHAT_TO_DO = "give the rank_N.log files that NCCL_MEGATRACE_LOG_PATH holds"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def logs_lines(logs: dict[int, _Log]) -> dict[int, NDArray[np.void]]:
    """The lines of each rank."""
    return {rank: log.lines for rank, log in logs.items()}


def _by_number(path: Path) -> tuple[int, str]:
    """By the number in a file's name: rank 10 comes after rank 9."""
    digits = re.findall(r"\d{1,9}", path.name)
    return (int(digits[-1]) if digits else -1, path.name)


def _read_all(files: Sequence[Path]) -> tuple[dict[int, _Log], list[str]]:
    """The logs by rank, and what could not be read."""
    problems: list[str] = []
    logs: dict[int, _Log] = {}
    for file in files[:MOST_RANKS]:
        try:
            log = _read(file, MOST_BYTES // max(1, min(len(files), MOST_RANKS)))
        except OSError as error:
            problems.append(f"{clean(str(file), 200)}: {error.strerror or 'cannot be read'}")
            continue
        problems += log.problems
        for rank in distinct(log.lines["rank"]).tolist():
            own = numbered(log.lines[log.lines["rank"] == rank])
            if rank in logs:
                problems.append(f"{clean(str(file), 200)}: rank {rank} is in {clean(logs[rank].path.name, 80)} already; left out")
            elif len(logs) < MOST_RANKS:
                logs[rank] = _Log(file, own, written_ns=log.written_ns)
    if len(files) > MOST_RANKS:
        problems.append(f"{len(files) - MOST_RANKS} more files than the {MOST_RANKS} that are read were left out")
    return dict(sorted(logs.items())), problems


def _read(path: Path, most: int) -> _Log:
    """One file, part by part; of more than ``most`` bytes its end. Raises ``OSError``."""
    name, problems = clean(str(path), 200), []
    parts: list[NDArray[np.void]] = []
    bad = first_bad = line = 0
    unknown: set[str] = set()
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        skipped = max(0, status.st_size - most)
        if skipped:
            file.seek(skipped)
            file.readline(PART_BYTES)
            problems.append(f"{name}: the first {size(skipped)} were not read: it is larger than what a job's logs may have")
        for part in _whole_lines(file.read, most):
            found = parse(part)
            parts.append(found.lines)
            if found.bad and not bad:
                first_bad = line + found.first_bad + 1
            bad, line, unknown = bad + found.bad, line + found.total, unknown | set(found.unknown)
    lines = np.concatenate(parts) if parts else parse(b"").lines
    if bad:
        place = f"line {first_bad}" if not skipped else f"line {first_bad} of what was read"
        problems.append(f"{name}: {bad} of {line} lines are no calls and were left out, the first is {place}")
    if unknown:
        problems.append(
            f"{name}: calls of {', '.join(clean(one, 16) for one in sorted(unknown)[:4])} are not known and were left out"
        )
        lines = lines[lines["function"] != 0]
    if len(lines) and (np.diff(lines["time_ns"]) < 0).any():
        lines = lines[np.argsort(lines["time_ns"], kind="stable")]
    return _Log(path, lines, problems, _written(status))


def _whole_lines(read: Callable[[int], bytes], most: int) -> Iterator[bytes]:
    """The file in parts that end with a line's end, but for the last, which may be cut."""
    rest = b""
    left = most
    while left > 0:
        data = read(min(PART_BYTES, left))
        if not data:
            break
        left -= len(data)
        cut = data.rfind(b"\n") + 1
        if cut:
            yield rest + data[:cut]
            rest = data[cut:]
        else:
            rest = (rest + data)[:PART_BYTES]  # a line of that length is none
    if rest:
        yield rest


def _written(status: os.stat_result) -> int:
    """Until when a file is known to have had no further line: its change that is remembered, or now where it is the
    original.
    """
    copied = status.st_ctime_ns - status.st_mtime_ns > 2 * SECOND
    return changed_ns(status) if copied else max(changed_ns(status), time.time_ns())


def quiet_until(logs: dict[int, _Log], end_ns: int) -> int:
    """Until when no log has a further line (ns): by the pauses after which their thread saves, and by the files' own times.

    A second at least: a log is saved in a pause only, so that a last line is no sign that the job went on.
    """
    pauses = []
    for log in logs.values():
        saves = np.flatnonzero(np.diff(log.lines["save"].astype(np.int64)))
        pauses += np.diff(log.lines["time_ns"])[saves].tolist()
    by_files = min((log.written_ns for log in logs.values()), default=0)
    return max(end_ns + max(SECOND, min(pauses, default=0)), by_files)


def _take_out(logs: dict[int, _Log], one: Shared, newest: int) -> None:
    """Take the call that some ranks lack at the end out of the logs that have it: it says nothing of them."""
    for chain in one.chains.values():
        last = chain.rows[chain.lines["op_count"] == newest]
        log = logs[chain.rank]
        log.lines = np.delete(log.lines, last)


def _doubt_text(one: Shared, newest: int, ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:8]))
    return (
        f"all logs end at once and alike, but those of ranks {names} lack the last call (opCount {newest} of a communicator of "
        f"{len(one.ranks)} ranks): if the job stood there, they held it up"
    )


def _world(logs: dict[int, _Log], found: Found) -> int | None:
    if found.layout is not None:
        return found.layout.world
    return max(logs) + 1 if max(logs) < HIGHEST_WORLD else None


def _exchanges(found: Found) -> list[Shared]:
    return [one for one in found.shared if any(chain.exchanges for chain in one.chains.values())]


def _known_peers(found: Found) -> dict[int, NDArray[np.int32]] | None:
    return peers(_exchanges(found))


def _notes(logs: dict[int, _Log], found: Found, world: int | None) -> Iterator[str]:
    """What was taken for what."""
    layout: Layout | None = found.layout
    if layout is not None:
        yield f"{len(logs)} rank logs of a job divided into {layout.text()} (from {layout.source})"
    elif any(one.role != "hash" for one in found.shared) or not found.shared:
        advice = "write TP, PP and world_size into a config.yaml beside them"
        yield f"{len(logs)} rank logs; how the job is divided is not known: {advice}"
    missing = [rank for rank in range(world or 0) if rank not in logs]
    if missing:
        yield f"no log of {len(missing)} ranks: {', '.join(map(str, missing[:8]))}{' …' if len(missing) > 8 else ''}"
    if found.left_out:
        yield f"{found.left_out} streams were left out: which ranks share their communicators is not told"
