"""Debug logs of NCCL (``NCCL_DEBUG=INFO`` or ``TRACE``), read line by line into what each process says of its communicators.

A line begins with ``host:pid:tid [device] NCCL INFO`` (``src/debug.cc``); whoever gathers the logs may have put something before
it. Lines of all ranks may stand in one file. Calls are logged by the subsystem COLL (``NCCL_DEBUG_SUBSYS``, not on by default),
communicators by INIT, rings by GRAPH. On standard output the newest lines may be held back (it is block-buffered into a file or a
pipe); into a file of NCCL_DEBUG_FILE they are not.

Before 2.18 no line gives a communicator an id. Then the n-th of its size on one process is taken for the n-th of that size on
another, as long as that gives no rank twice.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ncclwatch.ingest.torch_watchdog import MARK, Watchdog
from ncclwatch.model.events import Function
from ncclwatch.model.state import ChannelRing

MAX_LINE_BYTES = 8192
"""NCCL cuts its own lines at 1,024 to 2,048."""
MAX_PROCESSES, MAX_COMMUNICATORS, MAX_RANKS = 65536, 1024, 1 << 20
"""Processes in all, communicators of one process that are alive, ranks of a communicator."""
KEPT_CALLS = 1024
"""Newest calls of a communicator on a process; older ones are counted."""
MAX_RINGS, MAX_SIZES, MAX_WARNINGS, SHOWN_CHARACTERS = 64, 64, 4, 240

LINE = re.compile(
    r"(?<![\w.-])([\w.-]{1,128}):(\d{1,9}):(\d{1,9}) "
    r"(?:\[-?\d{1,9}\] (?:[^\s\[]\S{0,159} ){0,2}NCCL (INFO|WARN|TRACE|ABORT) ?|NCCL CALL )(.*)$"
)
_DEVICES = r"\d{1,9}\[\w{1,16}\] -> \d{1,9}\[\w{1,16}\]"
_LIFE = re.compile(
    r"comm (0x[0-9a-f]{1,16}) rank (\d{1,9}) nranks (\d{1,9}) cudaDev (-?\d{1,9})(?: nvmlDev -?\d{1,9})? "
    r"?(?:busId ([0-9a-f]{1,16}))?(.*?)"
    r" ?- (Init START|Init COMPLETE|Destroy COMPLETE|Abort COMPLETE)\b"
)
_COMM_ID = re.compile(r" commId 0x([0-9a-f]{1,16})")
_PARENT = re.compile(r" parent (0x[0-9a-f]{1,16})(?: splitCount (-?\d{1,9}))? color (-?\d{1,9}) ")
_CALL = re.compile(
    r"(\w{1,24}): opCount ([0-9a-f]{1,16}) sendbuff \S{1,20} recvbuff \S{1,20} (?:acc \S{1,20} )?count (\d{1,19}) "
    r"datatype (\d{1,4}) op (-?\d{1,9}) root (-?\d{1,9}) comm (0x[0-9a-f]{1,16}) \[nranks=(\d{1,9})\]"
)
_RING = re.compile(r"Ring (\d{1,5}) : (\d{1,9}) -> (\d{1,9}) -> (\d{1,9})")
_CHANNEL = re.compile(r"Channel \d{1,5}(?:/\d{1,5})? : " + _DEVICES + r"(?: \[\w+\])? via ([A-Z0-9]+(?:/[A-Za-z]\w*)?)")
_VERSION = re.compile(r"NCCL version (\d{1,3})\.(\d{1,3})\.(\d{1,3})")

FUNCTIONS = {
    "AllReduce": Function.ALL_REDUCE,
    "Broadcast": Function.BROADCAST,
    "Reduce": Function.REDUCE,
    "AllGather": Function.ALL_GATHER,
    "ReduceScatter": Function.REDUCE_SCATTER,
    "AlltoAll": Function.ALL_TO_ALL,
    "AllToAll": Function.ALL_TO_ALL,
    "Gather": Function.GATHER,
    "Scatter": Function.SCATTER,
    "Send": Function.SEND,
    "Recv": Function.RECV,
}
"""By the names with which calls are logged (``opName``, ``src/enqueue.cc``, ``src/collectives.cc``)."""
COUNTED = frozenset({"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter"})
"""Collectives of which NCCL itself keeps a count (``ncclComm.seqNumber``)."""


class Call(NamedTuple):
    """One call, as it was logged. ``order``: its place among all lines; ``elements``: what was asked for."""

    order: int
    function: Function
    op_count: int
    elements: int
    datatype: int
    redop: int
    root: int


@dataclass(slots=True)
class LoggedCommunicator:
    """A communicator of one process, while it is alive. ``counts``: calls of each function since it was made."""

    address: int
    hash: int
    rank: int
    nranks: int
    device: int
    bus_id: int
    order: int
    ready: bool = False
    born: bool = False
    """Whether the log shows its creation, or its first call."""
    nameless: bool = False
    """Whether no line gave it an id."""
    counts: Counter[str] = field(default_factory=Counter)
    calls: deque[Call] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))
    rings: list[ChannelRing] = field(default_factory=list)


@dataclass(slots=True)
class LoggedProcess:
    """What one process said. ``alive``: its communicators by address; ``aborted``: how many it gave up."""

    host: str
    pid: int
    alive: dict[int, LoggedCommunicator] = field(default_factory=dict)
    hashes: dict[int, int] = field(default_factory=dict)
    """Of communicators that were ever made at an address: parents of splits."""
    aborted: list[LoggedCommunicator] = field(default_factory=list)
    transports: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    warned: int = 0
    cut_off: bool = False
    """Whether a line of its log ends in the middle: calls may be missing."""
    newest: LoggedCommunicator | None = None
    made: Counter[int] = field(default_factory=Counter)
    """Communicators without an id that were ever made, by their size."""


class LogReader:
    """Takes lines of any number of processes, in their order."""

    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], LoggedProcess] = {}
        self._hosts: dict[int, list[str]] = defaultdict(list)
        """By pid, the hosts of processes that have it."""
        self.version: tuple[int, int, int] | None = None
        self.calls_logged = False
        self.lines = 0
        self.left_out: Counter[str] = Counter()
        self.unplaced: dict[int, dict[tuple[str, int], int]] = defaultdict(dict)
        """By size of communicators whose creation the log does not show, the newest ``opCount`` of each process."""
        self.watchdog = Watchdog()

    def take(self, lines: Iterable[bytes]) -> None:
        """All lines of one file; the last may have no end."""
        last: LoggedProcess | None = None
        whole = True
        for raw in lines:
            self.lines += 1
            if b"NCCL INFO" not in raw and MARK.search(raw):
                self.watchdog.take(raw[:MAX_LINE_BYTES].decode(errors="replace"))
            elif b"NCCL " in raw:
                last = self._line(raw[:MAX_LINE_BYTES].decode(errors="replace").rstrip())
                whole = raw.endswith(b"\n")
        if last is not None and not whole:
            last.cut_off = True

    def _line(self, line: str) -> LoggedProcess | None:
        found, process = LINE.search(line), None
        while found is not None and (process := self._process(found[1], int(found[2]), inside=process is not None)) is not None:
            within = LINE.search(found[5]) if "NCCL " in found[5] else None
            if within is None:
                self._said(process, found[4], found[5])
                break
            # Another process wrote into this line: what this one had called may be lost.
            process.cut_off |= self.calls_logged
            found = within
        return process

    def _process(self, host: str, pid: int, *, inside: bool) -> LoggedProcess | None:
        if inside:
            # The name of the host may follow a word without a space.
            host = next((known for known in self._hosts.get(pid, ()) if host.endswith(known)), host)
        process = self.processes.get((host, pid))
        if process is None:
            if len(self.processes) >= MAX_PROCESSES:
                self.left_out["processes"] += 1
                return None
            process = self.processes[host, pid] = LoggedProcess(host, pid)
            self._hosts[pid].append(host)
        return process

    def _said(self, process: LoggedProcess, level: str, said: str) -> None:
        if level == "WARN":
            process.warned += 1
            if len(process.warnings) < MAX_WARNINGS:
                process.warnings.append(said[:SHOWN_CHARACTERS])
        elif level == "INFO":
            self._info(process, said)

    def _info(self, process: LoggedProcess, said: str) -> None:
        if call := _CALL.match(said):
            self._call(process, call)
        elif life := _LIFE.search(said):
            self._life(process, life)
        elif ring := _RING.match(said):
            self._ring(process, *map(int, ring.groups()))
        elif channel := _CHANNEL.match(said):
            process.transports[channel[1]] += 1
        elif version := _VERSION.match(said):
            self.version = (int(version[1]), int(version[2]), int(version[3]))

    def _call(self, process: LoggedProcess, found: re.Match[str]) -> None:
        self.calls_logged = True
        function, communicator = FUNCTIONS.get(found[1]), process.alive.get(int(found[7], 16))
        size = int(found[8])
        if function is not None and communicator is None and (size in self.unplaced or len(self.unplaced) < MAX_SIZES):
            self.unplaced[size][process.host, process.pid] = int(found[2], 16)
        if function is None or communicator is None:
            self.left_out["calls of a function or on a communicator that the log does not tell"] += 1
            return
        communicator.counts[found[1]] += 1
        numbers = int(found[2], 16), int(found[3]), int(found[4]), int(found[5]), int(found[6])
        # A log that was cut at its beginning, and yet has the first call.
        communicator.born |= not communicator.calls and numbers[0] == 0
        communicator.calls.append(Call(self.lines, function, *numbers))

    def _life(self, process: LoggedProcess, found: re.Match[str]) -> None:
        address, rank, nranks, what = int(found[1], 16), int(found[2]), int(found[3]), found[7]
        if what in ("Destroy COMPLETE", "Abort COMPLETE"):
            gone = process.alive.pop(address, None)
            if gone is not None and what == "Abort COMPLETE" and len(process.aborted) < MAX_COMMUNICATORS:
                process.aborted.append(gone)
            return
        own = process.alive.get(address)
        comm_hash = self._hash(process, found[6])
        nameless = comm_hash is None and _PARENT.search(found[6] + " ") is None
        if nameless:
            comm_hash = own.hash if own is not None and not own.ready else _numbered(nranks, process.made[nranks])
        if comm_hash is None or not rank < nranks <= MAX_RANKS:
            self.left_out["communicators without an id"] += 1
            return
        if own is None or own.hash != comm_hash:
            if len(process.alive) >= MAX_COMMUNICATORS:
                self.left_out["communicators"] += 1
                return
            own = LoggedCommunicator(address, comm_hash, rank, nranks, int(found[4]), int(found[5] or "0", 16), self.lines)
            # Before 2.18 only its completion is logged.
            own.born, own.nameless = what == "Init START" or nameless, nameless
            process.made[nranks] += nameless
            process.alive[address] = process.newest = own
            process.hashes[address] = comm_hash
        own.ready = what == "Init COMPLETE"

    def finish(self) -> None:
        """All is read. Communicators without an id of which a rank would be there twice are left out: they are of several."""
        nameless = [(process, own) for process in self.processes.values() for own in process.alive.values() if own.nameless]
        times = Counter((own.hash, own.rank) for _, own in nameless)
        several = {comm_hash for (comm_hash, _), number in times.items() if number > 1}
        for process, own in nameless:
            if own.hash in several:
                del process.alive[own.address]
                self.left_out["communicators without an id"] += 1

    def _hash(self, process: LoggedProcess, text: str) -> int | None:
        """The communicator's id; of a split that is logged without one (2.24 on) a number of our own, equal on all its ranks."""
        if comm_id := _COMM_ID.search(text):
            return int(comm_id[1], 16)
        split = _PARENT.search(text + " ")
        parent = process.hashes.get(int(split[1], 16)) if split else None
        if split is None or parent is None:
            return None
        return int.from_bytes(hashlib.blake2b(f"{parent} {split[2]} {split[3]}".encode(), digest_size=8).digest(), "little")

    def _ring(self, process: LoggedProcess, channel: int, previous: int, own: int, following: int) -> None:
        """Rings are logged while their communicator is created; the line does not name it."""
        made = process.newest
        if (
            made is None
            or made.ready
            or made.rank != own
            or max(previous, following) >= made.nranks
            or len(made.rings) >= MAX_RINGS
        ):
            return
        made.rings.append(ChannelRing(channel, previous, following))


def _numbered(nranks: int, number: int) -> int:
    """A number for the communicator that is the n-th of its size on a process."""
    return int.from_bytes(hashlib.blake2b(f"{nranks} ranks, number {number}".encode(), digest_size=8).digest(), "little")
