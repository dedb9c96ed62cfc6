"""The calls plane for an agent: attach, watch processes, take records, detach."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ncclwatch.errors import TargetError
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function
from ncclwatch.model.rows import distinct
from ncclwatch.probes.attach import Attacher, Backend, detach
from ncclwatch.probes.bpf import BpfError, Link, possible_cpus, raise_memlock_limit
from ncclwatch.probes.functions import FUNCTIONS
from ncclwatch.probes.map_layouts import MAX_BINARIES, MAX_SITES, SITE_DTYPE, Counter
from ncclwatch.probes.namespaces import PidTranslation, process_key
from ncclwatch.probes.processes import is_descendant, start_time
from ncclwatch.probes.program import Compilation, Kernel
from ncclwatch.probes.ring import RingReader
from ncclwatch.probes.site_cache import sites_of
from ncclwatch.probes.sites import FunctionSites, ProbeSite, code_range
from ncclwatch.probes.support import check_support
from ncclwatch.probes.traced_file import CommunicatorOffsets, TracedFile
from ncclwatch.target.elf import ElfFile

DEFAULT_RING_BYTES = 4 << 20
"""Room for 29,000 records: a quarter of a second of eight ranks that make 14,000 calls a second each."""

Events = npt.NDArray[Any]


class Leave(StrEnum):
    """Which leaves are recorded: each costs a single-stepped trap."""

    NONE = "none"
    BLOCKING = "blocking"
    """Of functions that wait for other ranks by design, and of those that make something."""
    ALL = "all"


@dataclass(frozen=True, slots=True)
class SiteHits:
    """How often a site was hit since it was attached, by any process, and what that costs a hit (ns, typical)."""

    binary: int
    site: ProbeSite
    hits: int

    @property
    def cost_ns(self) -> int:
        """Time this site took from the processes that hit it, estimated by its cost class."""
        return self.hits * self.site.cost.typical_ns


@dataclass
class _Binary:
    """One file as attached."""

    number: int
    path: str
    inode: tuple[int, int]
    build_id: str
    functions: tuple[FunctionSites, ...]
    sites: dict[int, ProbeSite]
    links: list[Link]
    code: tuple[int, int]


class CallTracer:
    """Records of NCCL calls of the processes of this node, from :meth:`start` to :meth:`stop`.

    Everything hangs on descriptors of this process: if it dies, every probe is gone.
    """

    def __init__(
        self, kernel: Kernel, attacher: Attacher, translation: PidTranslation, leave: Leave, functions: frozenset[Function]
    ):
        self._kernel = kernel
        self._attacher = attacher
        self._translation = translation
        self._leave = leave
        self._functions = functions
        self._ring: RingReader | None = None
        self._binaries: dict[int, _Binary] = {}
        self._aliases: dict[int, int] = {}
        self._lifecycle: list[Link] = []
        self._free_sites = list(range(MAX_SITES - 1, -1, -1))
        self._targets: dict[int, int] = {}
        self._translated: dict[int, bytes] = {}
        self._all = False
        self._every_exec = False
        self.follow_children = True
        """Whether children of watched processes are watched as well; they are, unless this is switched off."""
        self.unidentified = 0
        """Records dropped because their process was gone before anybody could tell whether it descends from a watched one."""

    @classmethod
    def start(
        cls,
        files: Iterable[TracedFile],
        *,
        watch: Iterable[int] | None,
        leave: Leave = Leave.BLOCKING,
        functions: Iterable[Function] | None = None,
        every_exec: bool = False,
        ring_bytes: int = DEFAULT_RING_BYTES,
        compilation: Compilation | None = None,
        backend: Backend | None = None,
        proc: Path = Path("/proc"),
    ) -> CallTracer:
        """Attach to ``files`` and watch the processes ``watch`` (numbers in ``proc``) and their children, or all with ``None``.

        Processes that start later and map one of the files are seen from their first call. ``compilation`` is one that was begun
        earlier, to save the wait. ``every_exec`` adds an EXEC record for every program that starts on this node. Raises
        :class:`PrivilegeError`, :class:`UnsupportedError`, :class:`CompileError`, :class:`BpfError`, :class:`ElfError`.
        """
        check_support()
        raise_memlock_limit()
        translation = PidTranslation.detect(proc)
        image = (compilation or Compilation()).result()
        kernel = Kernel(image, ring_bytes=ring_bytes)
        chosen = frozenset(FUNCTIONS if functions is None else functions)
        tracer = cls(kernel, Attacher(kernel, backend), translation, leave, chosen)
        try:
            tracer._begin(ring_bytes, watch_all=watch is None, every_exec=every_exec)
            for pid in watch or ():
                tracer.add_process(pid)
            for file in files:
                tracer.add_file(file)
        except BaseException:
            tracer.stop()
            raise
        return tracer

    def _begin(self, ring_bytes: int, *, watch_all: bool, every_exec: bool) -> None:
        self._ring = RingReader(self._kernel.maps["events"].fd, ring_bytes, EVENT_DTYPE)
        self._all, self._every_exec = watch_all, every_exec
        self._write_config()
        for function in self._functions:
            self.set_gate(function)
        self._lifecycle = self._attacher.attach_lifecycle()

    def _write_config(self) -> None:
        config = self._translation.pack_config(watch_all=self._all, every_exec=self._every_exec)
        self._kernel.maps["config"].update(_index(0), config)

    # --- files -----------------------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> Backend | None:
        """How uprobes are placed; ``None`` before the first file."""
        return self._attacher.backend

    def add_file(self, file: TracedFile) -> int:
        """Attach to a file that carries NCCL, or find it attached already; returns its number in records.

        One file is attached once, by inode, whatever path leads to it. Raises as :meth:`start` does, and :class:`TargetError`
        when it exports nothing of NCCL.
        """
        with ElfFile.open(file.path) as elf:
            status = os.fstat(elf.fd)
            inode = (status.st_dev, status.st_ino)
            for binary in self._binaries.values():
                if binary.inode == inode:
                    self.set_offsets(binary.number, file.offsets)
                    return binary.number
            functions = sites_of(elf, self._functions)
            if not functions:
                raise TargetError(f"{file.path} has no function of NCCL to probe", "give the file that carries NCCL")
            number = next((n for n in range(MAX_BINARIES) if n not in self._binaries and n not in self._aliases), None)
            chosen = [site for found in functions for site in self._chosen_sites(found)]
            if number is None or len(chosen) > len(self._free_sites):
                raise TargetError("too many different files carry NCCL on this node", "attach to fewer processes")
            binary = _Binary(number, file.path, inode, elf.build_id, functions, {}, [], code_range(elf, functions))
            self._binaries[number] = binary
            try:
                self.set_offsets(number, file.offsets)
                for site in chosen:
                    self._register_site(binary, site)
                binary.links = self._attacher.attach(elf.fd, list(binary.sites.items()))
            except BaseException:
                self._drop(number)
                raise
        return number

    def _chosen_sites(self, found: FunctionSites) -> tuple[ProbeSite, ...]:
        return (found.entry, *found.returns) if self._sees_leave(found.function) else (found.entry,)

    def _sees_leave(self, function: Function) -> bool:
        return self._leave is Leave.ALL or (self._leave is Leave.BLOCKING and FUNCTIONS[function].tells_on_return)

    def _register_site(self, binary: _Binary, site: ProbeSite) -> None:
        number = self._free_sites.pop()
        binary.sites[number] = site
        row = np.zeros((), SITE_DTYPE)
        row["address"], row["function"], row["binary"], row["kind"] = site.address, site.function, binary.number, site.kind
        self._kernel.maps["hits"].update(_index(number), bytes(8 * possible_cpus()))
        self._kernel.maps["sites"].update(_index(number), row.tobytes())

    def set_offsets(self, binary: int, offsets: CommunicatorOffsets) -> None:
        """Tell where this file's ``ncclComm`` keeps its members; may be done at any time."""
        row = offsets.pack(self._binaries[binary].code)
        self._kernel.maps["binaries"].update(_index(binary), row)

    def remove_file(self, binary: int) -> None:
        """Detach from a file."""
        if binary in self._binaries:
            self._drop(binary)

    def _drop(self, number: int) -> None:
        binary = self._binaries.pop(number)
        detach(binary.links)
        empty = np.zeros((), SITE_DTYPE).tobytes()
        for site in binary.sites:
            self._kernel.maps["sites"].update(_index(site), empty)
            self._free_sites.append(site)

    def functions(self, binary: int) -> tuple[FunctionSites, ...]:
        """Every probed function of a file, with its sites and what is wrong with them."""
        return self._binaries[binary].functions

    @property
    def files(self) -> Mapping[int, str]:
        """Number and path of every file that is attached."""
        return {number: binary.path for number, binary in self._binaries.items()}

    # --- processes -------------------------------------------------------------------------------------------------------------

    def add_process(self, pid: int) -> None:
        """Watch a process, by its number in ``/proc``.

        Raises :class:`TargetGoneError`, and :class:`BpfError` when there are too many.
        """
        started = start_time(self._translation.proc, pid)
        known = len(self._translation.namespaces)
        key = self._translation.key(pid)
        if len(self._translation.namespaces) != known:
            self._write_config()
        self._kernel.maps["watched"].update(key, pid.to_bytes(4, "little"))
        self._targets[pid] = started
        self._translated[pid] = key

    def remove_process(self, pid: int) -> None:
        """Watch a process no longer; what it does from now on is not recorded. Unknown processes are ignored."""
        key = self._translated.pop(pid, None)
        self._targets.pop(pid, None)
        if key is not None:
            # Ruled out first: in between it would count as unknown, and unknown is recorded.
            self._kernel.maps["ignored"].update(key, b"\1")
            self._kernel.maps["watched"].delete(key)

    @property
    def processes(self) -> frozenset[int]:
        """The processes that are watched by number."""
        return frozenset(self._targets)

    # --- gates -----------------------------------------------------------------------------------------------------------------

    def set_gate(self, function: Function, *, enter: bool = True, leave: bool = True) -> None:
        """Switch a function's records on and off. The trap at its probes is still paid: only detaching removes that."""
        seen = self._sees_leave(function)
        spec = FUNCTIONS[function].pack(enter=enter, leave=leave and seen, leave_seen=seen)
        self._kernel.maps["functions"].update(_index(function), spec)

    # --- records ---------------------------------------------------------------------------------------------------------------

    @property
    def filled(self) -> float:
        """How full the ring of records is, from 0 to 1."""
        return self._ring.filled if self._ring is not None else 0.0

    def poll(self, timeout_s: float = 0.0, *, batch_s: float = 0.0) -> Events:
        """Records since the last poll (dtype ``EVENT_DTYPE``), in the order in which the kernel wrote them.

        Waits up to ``timeout_s`` for the first one, then ``batch_s`` more to gather others. Only records of watched processes are
        returned. Raises :class:`RingError` when the ring is damaged.
        """
        if self._ring is None:
            return np.zeros(0, EVENT_DTYPE)
        if timeout_s > 0 and self._ring.wait(timeout_s) and batch_s > 0:
            time.sleep(batch_s)
        events = self._ring.read()
        if events.size and (events["flags"] & Flag.UNKNOWN_PROCESS).any():
            events = self._settle_unknown(events)
        if len(self._binaries) + len(self._aliases) > 1 and events.size:
            events = self._merge_twins(events)
        return events

    def _settle_unknown(self, events: Events) -> Events:
        """Decide about processes seen for the first time: children of watched ones are adopted, others ruled out."""
        unknown = (events["flags"] & Flag.UNKNOWN_PROCESS) != 0
        # Every exec of the machine is no reason to watch a process; a call to NCCL is.
        calls = unknown & (events["function"] != Function.NONE)
        keep = ~calls
        for namespace, number in {(int(e["pid_namespace"]), int(e["pid"])) for e in events[calls]}:
            rows = calls & (events["pid_namespace"] == namespace) & (events["pid"] == number)
            pid = self._adopt(namespace, number)
            if pid is not None:
                events["pid"][rows] = pid
                events["flags"][rows] &= ~np.uint16(Flag.UNKNOWN_PROCESS)
            if pid is not None or self._all:
                keep |= rows
            elif self._is_gone(namespace, number):
                self.unidentified += int(rows.sum())
        return events if keep.all() else events[keep]

    def _adopt(self, namespace: int, number: int) -> int | None:
        """Watch a process that turned up, if it is to be watched; its number in ``/proc``, or ``None``."""
        pid = self._translation.find(namespace, number)
        proc = self._translation.proc
        wanted = self._all and pid is not None
        if pid is not None and not wanted:
            returned = pid in self._targets and self._targets[pid] == start_time(proc, pid, missing=-1)
            wanted = returned or (self.follow_children and is_descendant(proc, pid, self._targets))
        if pid is None or not wanted:
            if not self._all:
                self._rule_out(namespace, number)
            return None
        try:
            self.add_process(pid)
        except (TargetError, BpfError):
            # Gone already, or one too many to be watched by number: its records still count where all are wanted.
            return pid if self._all else None
        return pid

    def _rule_out(self, namespace: int, number: int) -> None:
        """Record this process no more. One that is gone must not be ruled out: its number may be given to another."""
        key = process_key(namespace, number)
        self._kernel.maps["ignored"].update(key, b"\1")
        if self._is_gone(namespace, number):
            self._kernel.maps["ignored"].delete(key)

    def _is_gone(self, namespace: int, number: int) -> bool:
        pid = self._translation.find(namespace, number)
        return pid is None or start_time(self._translation.proc, pid, missing=-1) < 0

    def _merge_twins(self, events: Events) -> Events:
        """Drop what two attachments to one file reported twice, and detach one of them.

        Containers may reach one file of a shared image layer through different overlay mounts: other device, other inode number,
        but one inode for the kernel, so both attachments fire. A process has one NCCL of a build mapped: two numbers mean that.
        """
        for alias in self._aliases:
            events = events[events["binary"] != alias]
        pairs = distinct(events["pid"].astype(np.uint64) << np.uint64(32) | events["binary"].astype(np.uint64))
        by_pid: dict[int, list[int]] = {}
        for pid, number in (divmod(pair, 1 << 32) for pair in pairs.tolist()):
            if number in self._binaries:
                by_pid.setdefault(pid, []).append(number)
        for numbers in by_pid.values():
            for number in numbers[1:]:
                first = self._binaries.get(numbers[0])
                twin = self._binaries.get(number)
                if first and twin and first.build_id and first.build_id == twin.build_id:
                    self._drop(number)
                    self._aliases[number] = numbers[0]
                    events = events[events["binary"] != number]
        return events

    # --- accounts --------------------------------------------------------------------------------------------------------------

    def counters(self) -> dict[Counter, tuple[int, ...]]:
        """What the programs counted since the start, by CPU."""
        return {counter: self._per_cpu("counters", counter) for counter in Counter if counter is not Counter.COUNTERS}

    def losses(self) -> tuple[int, ...]:
        """Records lost since the start because the ring was full, by CPU."""
        return self._per_cpu("counters", Counter.LOST)

    def hits(self) -> tuple[SiteHits, ...]:
        """Hits of every site, by any process of this node."""
        return tuple(
            SiteHits(binary.number, site, sum(self._per_cpu("hits", number)))
            for binary in self._binaries.values()
            for number, site in binary.sites.items()
        )

    def _per_cpu(self, name: str, index: int) -> tuple[int, ...]:
        raw = self._kernel.maps[name].lookup(_index(index)) or b""
        return tuple(int(value) for value in np.frombuffer(raw, np.uint64))

    def stop(self) -> None:
        """Detach everything and free it; safe to do twice. Records that were not polled are gone."""
        detach([link for binary in self._binaries.values() for link in binary.links] + self._lifecycle)
        self._binaries.clear()
        self._lifecycle = []
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._kernel.close()

    def __enter__(self) -> CallTracer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def _index(number: int) -> bytes:
    """The key of an array map."""
    return int(number).to_bytes(4, "little")


__all__ = ["CallTracer", "CommunicatorOffsets", "Leave", "SiteHits", "TracedFile"]
