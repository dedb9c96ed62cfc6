"""NCCL's debug logs as records: communicators, who called what, creations that do not end, warnings.

A log is what was called, not what is open: like an answer of RAS it is taken as of a job that stands still. Lines of INFO have no
times; the order within a process is known, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.batch import NodeBatch, PlaneState
from ncclwatch.ingest.base import HEAD_BYTES, Format, Ingested, IngestError, changed_ns
from ncclwatch.ingest.moment import CONFIDENCE, STANDSTILL_S, UNTOLD
from ncclwatch.ingest.nccl_log_lines import (
    COUNTED,
    KEPT_CALLS,
    LINE,
    MAX_LINE_BYTES,
    LoggedCommunicator,
    LoggedProcess,
    LogReader,
)
from ncclwatch.ingest.torch_watchdog import is_watchdogs
from ncclwatch.ingest.torch_watchdog_culprits import name_culprits
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Communicator, Direction, ProcessInfo, ProcessSample, Transport, VersionSource
from ncclwatch.model.verdict import Verdict

STANDSTILL_NS = STANDSTILL_S * 10**9
BLIND = ("NCCL's log has what was called: what is open and how far it got is not in it",)
NO_CALLS = "no call is in the log: none was made, or NCCL_DEBUG_SUBSYS did not name COLL"
MAX_FILE_BYTES = 16 << 30
SEARCHED_BYTES = 1 << 20
"""Bound: bytes at either end of a text in which lines of NCCL are looked for."""
MAX_PEERS = 4096
SHOWN, SUMMED = 8, 2


class NcclLog(Format):
    """Debug logs, one of all ranks or any number of each."""

    name = "nccl-log"
    what = "debug log of NCCL"

    def recognises(self, head: bytes, path: Path) -> bool:
        """By a line that NCCL wrote, or PyTorch's watchdog. A program may have said much before that, and a watchdog comes last:
        of other text the beginning and the end are looked at.
        """
        if _has_lines(head):
            return True
        return len(head) >= HEAD_BYTES and b"\0" not in head and any(map(_has_lines, _ends(path)))

    def read(self, files: Sequence[Path]) -> Sequence[Ingested]:
        """All files together: processes that share communicators are of one job, which the engine finds out."""
        reader, problems, written = LogReader(), list[str](), 0
        for path in files:
            try:
                with path.open("rb") as file:
                    reader.take(_lines(file))
                written = max(written, changed_ns(path.stat()))
            except OSError as error:
                problems.append(f"{path}: {error.strerror or error}")
        reader.finish()
        if not reader.processes and not reader.watchdog:
            raise IngestError(
                problems[0] if problems else f"{files[0]}: no line of NCCL in it", "run the job with NCCL_DEBUG=INFO"
            )
        problems += [f"left out: {count} {what}" for what, count in reader.left_out.items()]
        problems += [
            f"the log of pid {one.pid} on {one.host} has a line that ends in the middle: calls may be missing"
            for one in reader.processes.values() if one.cut_off
        ]  # fmt: skip
        blind = BLIND if reader.calls_logged else (*BLIND, NO_CALLS)
        batches = _batches(reader, written)
        return [Ingested(batches, problems, blind, list(_notes(reader)), str(files[0].parent), amend=partial(_amend, reader))]


def _has_lines(text: bytes) -> bool:
    lines = (line[:MAX_LINE_BYTES].decode(errors="replace") for line in text.splitlines())
    return any(is_watchdogs(line) or LINE.search(line) for line in lines)


def _ends(path: Path) -> Iterator[bytes]:
    """The beginning and the end of a file, nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            yield file.read(SEARCHED_BYTES)
            file.seek(max(file.tell(), path.stat().st_size - SEARCHED_BYTES))
            yield file.read(SEARCHED_BYTES)
    except OSError:
        return


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Lines, none longer than we read; what is beyond is skipped."""
    left, inside = MAX_FILE_BYTES, False
    while left > 0 and (line := file.readline(MAX_LINE_BYTES)):
        left -= len(line)
        if not inside:
            yield line
        inside = not line.endswith(b"\n") and len(line) == MAX_LINE_BYTES


# --- words --------------------------------------------------------------------------------------------------------------


def _notes(reader: LogReader) -> Iterator[str]:
    sizes = Counter(one.nranks for process in reader.processes.values() for one in process.alive.values())
    if not reader.processes:
        return
    ways = Counter[str]()
    for process in reader.processes.values():
        ways.update(process.transports.keys())
    told = ", ".join(f"{count // size or 1} of {size} ranks" for size, count in sorted(sizes.items(), reverse=True)[:SHOWN])
    yield f"NCCL's log: {len(reader.processes)} processes, communicators: {told or 'none that are alive'}"
    if ways:
        yield f"they are joined by {', '.join(sorted(ways)[:SHOWN])}"
    if not reader.calls_logged:
        yield f"{NO_CALLS} (NCCL_DEBUG_SUBSYS=INIT,COLL)"
    for process in reader.processes.values():
        for own in process.aborted[:1]:
            yield f"pid {process.pid} on {process.host} has aborted communicator {own.hash:016x}, of which it was rank {own.rank}"


def _amend(reader: LogReader, verdict: Verdict) -> Verdict:
    """A verdict as logs support it, with what the processes that it names, or else any, have warned of."""
    named = {(one.host, one.pid) for one in verdict.culprits}
    warned = [one for one in reader.processes.values() if one.warnings and (not named or (one.host, one.pid) in named)]
    lines = tuple(f"pid {one.pid} on {one.host} warned {one.warned} times, first: {one.warnings[0]}" for one in warned[:SHOWN])
    waits = (*_unplaced(reader), *islice(reader.watchdog.lines(), SHOWN))
    if not reader.processes:
        verdict = replace(verdict, summary="; ".join(waits[:SUMMED]))
    verdict = name_culprits(verdict, reader.watchdog)
    confidence = min(verdict.confidence, CONFIDENCE) if verdict.culprits else verdict.confidence
    unobserved = (UNTOLD, *((NO_CALLS,) if not reader.calls_logged else ()), *verdict.unobserved)
    return replace(
        verdict, evidence=(*verdict.evidence, *waits, *lines), confidence=confidence, unobserved=unobserved, planes=("nccl-log",)
    )  # fmt: skip


def _unplaced(reader: LogReader) -> Iterator[str]:
    """Who has called less on communicators of which the log tells the size alone: whether it is one of them, it does not say."""
    for size, newest in list(reader.unplaced.items())[:SHOWN]:
        most = max(newest.values())
        behind = [f"pid {pid} on {host} (opCount {count:x})" for (host, pid), count in newest.items() if count < most]
        if behind and 2 * len(behind) < len(newest):
            more = f" and {len(behind) - SHOWN} more" if len(behind) > SHOWN else ""
            yield (
                f"on communicators of {size} ranks whose creation the log does not show, {len(newest)} processes have called up "
                f"to opCount {most:x}, but {', '.join(behind[:SHOWN])}{more}"
            )


# --- records ------------------------------------------------------------------------------------------------------------


def _batches(reader: LogReader, written_ns: int) -> list[NodeBatch]:
    """The job when its logs end, twice; a batch a host, its calls with the first."""
    hosts: dict[str, list[LoggedProcess]] = {}
    for process in reader.processes.values():
        hosts.setdefault(process.host, []).append(process)
    found = _Found(reader)
    batches = []
    for number, time_ns in enumerate((reader.lines, reader.lines + STANDSTILL_NS)):
        for host, processes in hosts.items():
            samples = tuple(sample for one in processes if (sample := found.sample(one, time_ns, written_ns)) is not None)
            batches.append(NodeBatch(
                host=host, boot_id=f"log {host}", sequence=number, time_ns=time_ns, wall_ns=written_ns, looked=True,
                interval_s=float(STANDSTILL_S), samples=samples, events=_events(processes) if number == 0 else None,
                planes=(PlaneState("nccl-log", True),),
            ))  # fmt: skip
    return batches


class _Found:
    """What all logs together say of the communicators."""

    def __init__(self, reader: LogReader) -> None:
        self.reader = reader
        self.holders: dict[int, set[int]] = {}
        self.creating = any(not own.ready for process in reader.processes.values() for own in process.alive.values())
        for process in reader.processes.values():
            for own in process.alive.values():
                self.holders.setdefault(own.hash, set()).add(own.rank)

    def sample(self, process: LoggedProcess, time_ns: int, wall_ns: int) -> ProcessSample | None:
        """The process when its log ends. One without communicators tells something only where others wait in a creation."""
        if not process.alive and not self.creating:
            return None
        known = VersionSource.VERSION if self.reader.version is not None else VersionSource.UNKNOWN
        info = ProcessInfo(
            ProcessKey(f"log {process.host}", process.pid, 0, ""), process.host, "", (), "", self.reader.version, known
        )
        communicators = tuple(self._communicator(own, counted=not process.cut_off) for own in process.alive.values())
        return ProcessSample(info, time_ns, wall_ns, 0, "", communicators)

    def _communicator(self, own: LoggedCommunicator, *, counted: bool) -> Communicator:
        unseen = [rank for rank in range(min(own.nranks, MAX_PEERS)) if rank not in self.holders[own.hash]]
        near = [peer for ring in own.rings for peer in (ring.prev, ring.next)] or [(own.rank + 1) % own.nranks]
        peers = dict.fromkeys(peer for peer in (*unseen[:SHOWN], *near) if peer != own.rank)
        counts = {name: own.counts[name] for name in COUNTED} if counted and own.born and self.reader.calls_logged else {}
        return Communicator(
            address=own.address, hash=own.hash, rank=own.rank, nranks=own.nranks, device=own.device, bus_id=own.bus_id,
            sequence_numbers=counts, init_state="ncclSuccess" if own.ready else "ncclInProgress", finder="nccl-log",
            rings=tuple(own.rings), transports=tuple((0, peer, Direction.SEND, Transport.UNKNOWN) for peer in peers),
        )  # fmt: skip


def _events(processes: Sequence[LoggedProcess]) -> NDArray[Any]:
    """Calls of one host's processes in the order of the lines; a nanosecond a line, for nobody knows their times."""
    parts = [_calls(process, own) for process in processes if not process.cut_off for own in process.alive.values() if own.ready]
    events = np.concatenate([np.zeros(0, EVENT_DTYPE), *parts])
    return events[np.argsort(events["time_ns"], kind="stable")]


def _calls(process: LoggedProcess, own: LoggedCommunicator) -> NDArray[Any]:
    events = np.zeros(len(own.calls) + 1, EVENT_DTYPE)
    made = own.born and len(own.calls) < KEPT_CALLS
    events[0]["time_ns"], events[0]["kind"], events[0]["function"] = own.order, Kind.LEAVE, Function.COMM_INIT_RANK
    for row, call in zip(events[1:], own.calls, strict=True):
        row["time_ns"], row["kind"], row["function"], row["op_count"] = call.order, Kind.ENTER, call.function, call.op_count
        row["count"], row["datatype"], row["redop"], row["peer"] = call.elements, call.datatype, call.redop, call.root
    events["pid"] = events["tid"] = process.pid
    events["flags"], events["comm"], events["comm_hash"] = Flag.COMM_READ, own.address, own.hash
    events["rank"], events["nranks"] = own.rank, own.nranks
    return events if made else events[1:]
