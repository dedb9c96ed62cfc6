"""The wire plane of one node: which processes' work requests are accounted for, and what the accounts say now."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from ncclwatch.errors import NcclwatchError, TargetGoneError
from ncclwatch.probes.bpf import Link
from ncclwatch.target.binary import NcclBinary
from ncclwatch.target.layout import Layout
from ncclwatch.target.memory import LiveReader
from ncclwatch.wire.accounts import QueuePairAccount, decode
from ncclwatch.wire.contexts import (
    QueuePair,
    VerbsContext,
    VerbsFile,
    context_at,
    find_contexts,
    find_queues,
    queue_pair_at,
    verbs_files,
)
from ncclwatch.wire.control import ControlKind, attach_control_path, library_below, library_of
from ncclwatch.wire.kernel import Attachment, WireKernel
from ncclwatch.wire.sites import DATA_PATH, POLLING, TAKEN, Site, data_path_sites, taken_sites


@dataclass
class WatchedProcess:
    """What is known of one process. ``unavailable`` says why its wire plane shows nothing, and is empty when it does."""

    pid: int
    layout: Layout | None = None
    bias: int = 0
    files: list[VerbsFile] = field(default_factory=list)
    contexts: dict[int, VerbsContext] = field(default_factory=dict)
    pairs: dict[int, QueuePair] = field(default_factory=dict)
    sites: dict[tuple[int, int, str], Site] = field(default_factory=dict)
    taken: list[Site] = field(default_factory=list)
    """Where its NCCL takes completions; none where that does not show."""
    attached: list[Attachment] = field(default_factory=list)
    unavailable: str = ""

    @property
    def unresolved(self) -> list[VerbsFile]:
        """Open devices whose context was not found."""
        known = {context.fd for context in self.contexts.values()}
        return [file for file in self.files if file.fd not in known]

    def places(self, *, light: bool) -> list[Site]:
        """Where its probes go: at each call that posts or polls, or (``light``) polls where they have found something."""
        sites = list(self.sites.values())
        return [*(site for site in sites if site.role not in POLLING), *self.taken] if light else sites


class WirePlane:
    """Resolution, probes and accounts for a set of processes.

    ``exact`` also probes the return of ``post_send``. Nothing on the data path is attached before :meth:`attach` (bursts are the
    governor's business) unless ``always`` is set: then every process is attached as soon as its functions are known.
    """

    def __init__(self, kernel: WireKernel, *, exact: bool = False, always: bool = False) -> None:
        self.kernel = kernel
        self.exact = exact
        self.always = always
        self.processes: dict[int, WatchedProcess] = {}
        self._control: dict[tuple[int, int], list[Link]] = {}
        self.light = False
        """Whether completions are (or were last) counted where NCCL takes them, and not at each call that asks for some."""
        self._everyone = False
        self._devices: dict[tuple[int, int], str] = {}

    def __enter__(self) -> WirePlane:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Detach everything; the kernel object stays the caller's."""
        self.detach()
        for links in self._control.values():
            for link in links:
                link.close()
        self._control.clear()

    # --- which processes ---------------------------------------------------------------------------------------------------

    def follow_everyone(self, root: Path = Path("/")) -> None:
        """Also take in processes that open an RDMA device later, as far as they use the libibverbs below ``root``."""
        self._everyone = True
        library = library_below(root)
        if library is not None:
            self._follow(str(library))

    def watch(
        self,
        pid: int,
        layout: Layout | None = None,
        bias: int = 0,
        files: list[VerbsFile] | None = None,
        *,
        quick: bool = False,
        binaries: Iterable[NcclBinary] = (),
    ) -> WatchedProcess:
        """Take a process in: resolve what it has open now, and hear of what it opens later.

        ``layout`` and ``bias`` are those of its NCCL, when it has one; ``files`` its open RDMA devices, looked up unless given.
        In ``binaries``, those of its NCCL, the place is looked for where it takes completions.
        ``quick``: only what NCCL's own table of devices leads to, where it has any. NCCL posts and polls by plain functions
        (src/misc/ibvwrap.cc, all tags); queue pairs of others with functions of their own are found by searching memory, which
        takes up to seconds. Watch it again without.
        Raises :class:`TargetGoneError` and :class:`PrivilegeError`.
        """
        process = self.processes.get(pid) or WatchedProcess(pid)
        process.layout, process.bias = layout, bias
        self.processes[pid] = process
        reader = LiveReader(pid)
        try:
            library = library_of(pid, reader.mappings())
            if library is not None:
                self._follow(library)
            process.files = verbs_files(pid) if files is None else files
            for context in find_contexts(reader, process.files, layout, bias, quick=quick):
                process.contexts[context.address] = context
                self._devices[pid, context.address] = context.device
            by_table = any(context.found_by == "nccl" for context in process.contexts.values())
            pairs, queues = ([], []) if quick and by_table else find_queues(reader, process.contexts.values())
            process.pairs.update((pair.address, pair) for pair in pairs)
            mappings = reader.mappings()
            process.taken = process.taken or taken_sites(pid, mappings, binaries)
            self._add_sites(process, data_path_sites(pid, mappings, process.contexts.values(), pairs, queues, exact=self.exact))
        finally:
            reader.close()
        process.unavailable = _why_unavailable(process, library)
        return process

    def _follow(self, library: str) -> None:
        status = os.stat(library)  # noqa: PTH116 - may be a link that only the kernel resolves
        identity = status.st_dev, status.st_ino
        if identity not in self._control:
            self._control[identity] = attach_control_path(self.kernel, library)

    def forget(self, pid: int) -> None:
        """Let go of a process."""
        process = self.processes.pop(pid, None)
        if process is not None:
            self.kernel.detach(process.attached)
            self._devices = {key: device for key, device in self._devices.items() if key[0] != pid}

    # --- what happens on the control path ------------------------------------------------------------------------------------

    def handle_events(self, timeout_s: float = 0.0) -> int:
        """React to devices and queues made since the last call; returns how many events there were."""
        events = self.kernel.control_events(timeout_s)
        for event in events:
            pid, context, kind = int(event["pid"]), int(event["context"]), int(event["kind"])
            process = self.processes.get(pid)
            if process is None:
                if not self._everyone or pid == os.getpid():
                    continue
                process = self.processes[pid] = WatchedProcess(pid)
            try:
                self._handle(process, kind, context, int(event["qp"]))
            except TargetGoneError:
                self.forget(pid)
        return len(events)

    def _handle(self, process: WatchedProcess, kind: int, context: int, qp: int) -> None:
        if kind == ControlKind.CONTEXT_CLOSED:
            process.contexts.pop(context, None)
        elif kind == ControlKind.QP_DESTROYED:
            process.pairs.pop(qp, None)
        elif kind == ControlKind.DEVICE_OPENED:
            return  # its context is known with the first use
        elif context not in process.contexts or (qp and qp not in process.pairs):
            self._resolve(process, context, qp)

    def _resolve(self, process: WatchedProcess, address: int, qp: int) -> None:
        reader = LiveReader(process.pid)
        try:
            if address not in process.contexts:
                process.files = verbs_files(process.pid)
                context = context_at(reader, process.files, address)
                if context is None:
                    return
                process.contexts[address] = context
                self._devices[process.pid, address] = context.device
            pairs = []
            if qp and (pair := queue_pair_at(reader, qp)) is not None:
                process.pairs[qp] = pair
                pairs = [pair] if pair.extended else []
            contexts = [process.contexts[address]]
            self._add_sites(process, data_path_sites(process.pid, reader.mappings(), contexts, pairs, exact=self.exact))
            process.unavailable = ""
        finally:
            reader.close()

    # --- probes on the data path -----------------------------------------------------------------------------------------------

    def _add_sites(self, process: WatchedProcess, sites: Iterable[Site]) -> None:
        fresh = {(site.inode, site.offset, site.program): site for site in sites}
        fresh = {key: site for key, site in fresh.items() if key not in process.sites}
        process.sites.update(fresh)
        if fresh and (self.always or process.attached):
            wanted = [site for site in fresh.values() if not self.light or site.role not in POLLING]
            process.attached += self.kernel.attach(wanted, counting=True)

    @property
    def can_be_light(self) -> bool:
        """Whether of every process the place is known where it takes completions, and nobody polls in another way."""
        watched = [process for process in self.processes.values() if process.sites]
        plain = all(site.role in DATA_PATH for process in watched for site in process.sites.values())
        return bool(watched) and plain and all(process.taken for process in watched)

    def attach(self, pids: Iterable[int] | None = None, *, paused: bool = False, light: bool = False) -> None:
        """Put the probes of these processes (all) in place, as one burst: what is in flight before it is not known.

        ``paused``: nothing is counted until :meth:`WireKernel.new_generation`. ``light``: as :meth:`WatchedProcess.places`.
        """
        self.light = light
        if paused:
            self.kernel.pause()
        else:
            self.kernel.new_generation()
        wanted = [self.processes[pid] for pid in (list(self.processes) if pids is None else pids)]
        fresh = [process for process in wanted if process.sites and not process.attached]
        self.kernel.ready_to_detach(sum(len(process.places(light=light)) for process in fresh))
        # Polling is hit without pause: in a burst, of no process before the probes of all others are in place.
        for polling in (not paused, paused):
            for process in list(fresh):
                sites = [site for site in process.places(light=light) if (site.role in (*POLLING, TAKEN)) is polling]
                try:
                    process.attached += self.kernel.attach(sites, counting=not paused)
                except NcclwatchError as error:
                    process.unavailable = error.message
                    fresh.remove(process)
                    self.detach([process.pid])

    def detach(self, pids: Iterable[int] | None = None) -> None:
        """Take the probes of these processes (all) away, of all of them at once; the accounts stay."""
        wanted = [self.processes[pid] for pid in (list(self.processes) if pids is None else pids)]
        self.kernel.detach([attachment for process in wanted for attachment in process.attached])
        for process in wanted:
            process.attached = []

    # --- accounts
    # ------------------------------------------------------------------------------------------------------------------

    def accounts(self) -> list[QueuePairAccount]:
        """All queue pairs of the watched processes, ordered by process, device and number."""
        found = [account for account in decode(*self.kernel.queue_pairs()) if account.pid in self.processes]
        return sorted(found, key=lambda account: (account.pid, self.device_of(account), account.number))

    def device_of(self, account: QueuePairAccount) -> str:
        """The RDMA device of a queue pair, also of one that is gone; ``""`` when it was never resolved."""
        return self._devices.get((account.pid, account.context), "")


def _why_unavailable(process: WatchedProcess, library: str | None) -> str:
    if process.sites:
        return ""
    if library is None and not process.files:
        return "this process does not use RDMA verbs: it has not loaded libibverbs"
    if not process.files:
        return "this process has no RDMA device open"
    return f"no ibv_context found for {', '.join(file.device for file in process.unresolved)}"


def monotonic_ns() -> int:
    """The clock of the accounts (``bpf_ktime_get_ns``)."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
