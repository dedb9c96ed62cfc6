"""The wire plane of a set of processes as a command or an agent uses it: one that cannot run says why, and the rest goes on."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ncclwatch.errors import NcclwatchError, PrivilegeError, TargetGoneError
from ncclwatch.model.state import Direction
from ncclwatch.probes.instructions import CostClass
from ncclwatch.probes.namespaces import PidTranslation
from ncclwatch.probes.support import UnsupportedError, check_support
from ncclwatch.target.binary import NcclBinary
from ncclwatch.target.layout import Layout
from ncclwatch.target.machine import Machine, this_machine
from ncclwatch.target.maps import Mapping as MemoryMapping
from ncclwatch.wire.accounts import QueuePairAccount
from ncclwatch.wire.bursts import Bursts
from ncclwatch.wire.contexts import VerbsFile, verbs_files
from ncclwatch.wire.control import library_of
from ncclwatch.wire.flows import Flow, FlowWatch
from ncclwatch.wire.governor import DEFAULT_BUDGET, MIN_BURST_S, Governor, Mode, ThreadCost
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.nccl_connections import BUILT_IN
from ncclwatch.wire.nccl_queues import QueueOwner
from ncclwatch.wire.plane import WirePlane, monotonic_ns
from ncclwatch.wire.prices import measure_costs
from ncclwatch.wire.sites import POLLING

QpKey = tuple[int, int, int]
"""(pid, address of the context, number of the queue pair)."""


@dataclass(frozen=True, slots=True)
class VerbsUser:
    """A process as the wire plane needs to know it; ``layout`` and ``bias`` are of its NCCL, ``networks`` NCCL's names of
    them.
    """

    pid: int
    layout: Layout | None
    bias: int
    networks: tuple[str, ...] = ()
    mappings: Sequence[MemoryMapping] = ()
    files: tuple[VerbsFile, ...] | None = None
    """Its open RDMA devices; looked up unless given."""
    binaries: tuple[NcclBinary, ...] = ()
    """Those of its NCCL, where the place is to be looked for at which it takes completions."""


def why_no_verbs(user: VerbsUser, files: Sequence[VerbsFile]) -> str:
    """Why a process has no work requests to be seen, in words; empty when it may have."""
    if files:
        return ""
    plugins = [name for name in user.networks if name not in BUILT_IN]
    if plugins:
        return f"NCCL's network here is the plugin '{plugins[0]}', which has no verbs device open: its requests cannot be seen"
    if "Socket" in user.networks:
        return "NCCL uses TCP sockets here, not RDMA"
    if library_of(user.pid, user.mappings) is None:
        return "this process does not use RDMA verbs: it has not loaded libibverbs"
    return "this process has no RDMA device open"


def check_architecture() -> None:
    """Raise :class:`UnsupportedError` where libibverbs' structures do not lie as :mod:`ncclwatch.wire.abi` says: the C library's
    mutex in the middle of them takes 40 bytes on x86-64 and 48 on aarch64.
    """
    if this_machine() is not Machine.X86_64:
        hint = "sockets and NCCL's steps are read all the same"
        raise UnsupportedError(f"RDMA work requests are not counted on {platform.machine()}", hint)


def check_numbering(proc: Path = Path("/proc")) -> None:
    """Raise where the kernel's numbers of processes are not ours: accounts, and the governor's bill, go by them.

    Targets in containers are no matter: what counts is where ncclwatch runs, or rather which ``/proc`` it sees.
    """
    if not PidTranslation.detect(proc).initial:
        raise PrivilegeError(
            "ncclwatch runs in a pid namespace of its own, where the kernel's numbers of threads mean nothing",
            "run it on the host, or in a container with --pid=host",
        )


class WireSession:
    """Programs, probes and judgement for some processes; nothing is loaded into the kernel before one of them uses RDMA.

    ``reason`` says why the plane does not run at all, ``reasons`` why one process shows nothing; both are empty where it does.
    """

    def __init__(self, mode: Mode = Mode.BURSTS, budget: float = DEFAULT_BUDGET, *, kernel: WireKernel | None = None) -> None:
        self.mode = mode
        self.budget = budget
        self.reason = "switched off" if mode is Mode.STATE else "no process uses RDMA"
        self.reasons: dict[int, str] = {}
        self.plane: WirePlane | None = None
        self.bursts: Bursts | None = None
        self._kernel = kernel
        self._own_kernel = kernel is None
        self._watch = FlowWatch()
        self._accounts: list[QueuePairAccount] = []
        self._flows: list[Flow] | None = None
        self._ports: dict[tuple[int, int], int] = {}
        self._to_search: dict[int, tuple[VerbsUser, list[VerbsFile]]] = {}

    @property
    def running(self) -> bool:
        """Whether probes are placed."""
        return self.plane is not None

    def start(self, users: Iterable[VerbsUser], *, quick: bool = False) -> None:
        """Resolve what these processes have open, and load the programs if any of them uses RDMA. A failure becomes
        ``reason``. Once it runs, further processes are taken in. ``quick``: as :meth:`WirePlane.watch`; what is left is done by
        :meth:`search`, a process at a time.
        """
        if self.mode is Mode.STATE:
            return
        candidates = []
        for user in users:
            if self.plane is not None and user.pid in self.plane.processes:
                continue
            files = list(user.files) if user.files is not None else verbs_files(user.pid)
            self.reasons[user.pid] = why_no_verbs(user, files)
            if files:
                candidates.append((user, files))
        if not candidates:
            return
        if self.plane is None and not self._load():
            return
        for user, files in candidates:
            self._take_in(user, files, quick=quick)
            if quick:
                self._to_search[user.pid] = user, files

    def search(self) -> None:
        """Search the memory of one process that was taken in quickly."""
        if self._to_search and self.plane is not None:
            user, files = self._to_search.pop(next(iter(self._to_search)))
            self._take_in(user, files)

    def _load(self) -> bool:
        """The programs into the kernel, and their price; whether that went well."""
        try:
            check_support()
            check_architecture()
            check_numbering()
            if self._kernel is None:
                self._kernel = WireKernel()
            costs = measure_costs(self._kernel)
        except (NcclwatchError, OSError, ImportError) as error:
            self.reason = _in_words(error)
            self.close()
            return False
        self.reason = ""
        self.plane = WirePlane(self._kernel, exact=self.mode is Mode.EXACT)
        self.bursts = Bursts(self.plane, Governor(costs, self.budget))
        return True

    def drop(self, pid: int) -> None:
        """Let go of a process."""
        self.reasons.pop(pid, None)
        self._to_search.pop(pid, None)
        self._ports = {key: port for key, port in self._ports.items() if key[0] != pid}
        self._watch.forget(pid)
        if self.plane is not None and self.bursts is not None:
            self.plane.forget(pid)
            keys, _ = self.plane.kernel.queue_pairs()
            self.plane.kernel.forget(keys[keys["pid"] == pid])
            self.bursts.governor.release(pid)

    @property
    def counted(self) -> set[int]:
        """The processes whose requests are counted while probes are in place."""
        return set() if self.plane is None else {pid for pid, process in self.plane.processes.items() if process.sites}

    def polls(self) -> dict[int, int]:
        """How often the threads of each process have asked for completions while probes were in place; of one whose polling
        functions are not probed that is not known.
        """
        if self.plane is None or self.plane.light:
            return {}
        processes = self.plane.processes.items()
        found = {pid: 0 for pid, process in processes if any(site.role in POLLING for site in process.sites.values())}
        for (pid, _), thread in self.plane.kernel.threads().items():
            if pid in found:
                # Of a plain poll entry and return are counted; of an extended one each call and its return.
                found[pid] += int(thread["polls"]) // 2
        return found

    @property
    def accounts(self) -> list[QueuePairAccount]:
        """The accounts as last read."""
        return self._accounts

    def devices(self, accounts: Iterable[QueuePairAccount]) -> dict[tuple[int, int], tuple[str, int]]:
        """RDMA device and port by (pid, context), of these accounts and of every context that was found."""
        if self.plane is None:
            return {}
        found = {
            (pid, context.address): (context.device, self._ports.get((pid, context.address)) or context.port or 1)
            for pid, process in self.plane.processes.items()
            for context in process.contexts.values()
        }
        for account in accounts:
            place = account.pid, account.context
            found.setdefault(place, (self.plane.device_of(account), self._ports.get(place) or 1))
        return found

    def _take_in(self, user: VerbsUser, files: list[VerbsFile], *, quick: bool = False) -> None:
        assert self.plane is not None and self.bursts is not None  # noqa: S101 - start made them
        try:
            process = self.plane.watch(user.pid, user.layout, user.bias, files, quick=quick, binaries=user.binaries)
        except (NcclwatchError, OSError) as error:
            self.reasons[user.pid] = _in_words(error)
            return
        self.reasons[user.pid] = process.unavailable
        if process.sites:
            self.bursts.governor.enrol(user.pid, monotonic_ns())
        for context in process.contexts.values():
            self._ports[user.pid, context.address] = context.port

    def close(self) -> None:
        """Take every probe away."""
        if self.plane is not None:
            self.plane.close()
            self.plane = self.bursts = None
        if self._own_kernel and self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    # --- counting --------------------------------------------------------------------------------------------------------

    def begin_exact(self) -> None:
        """Attach for good: from now on every request is counted, of processes that come later too. Tell the user :meth:`trial`
        first.
        """
        if self.plane is not None and not self.plane.always:
            self.plane.always = True
            self.plane.attach()

    def trial(self) -> str:
        """What exact counting will cost, in words, tried out for two milliseconds."""
        if self.bursts is None:
            return ""
        costs = self.bursts.governor.costs
        prices = f"a probed call costs {costs[CostClass.EMULATED].entry_and_return_ns / 1000:.1f} µs"
        stepped = self._stepped_sites()
        if stepped:
            dear = costs[CostClass.SINGLE_STEPPED].entry_and_return_ns / 1000
            prices += f" ({dear:.1f} µs in {', '.join(stepped)}, whose first instructions must be single-stepped)"
        self.bursts.begin()
        while not self.bursts.governor.due(monotonic_ns()):
            pass
        self.bursts.stop()
        worst = max(self.bursts.governor.threads.values(), key=lambda thread: thread.last_share, default=None)
        if worst is None or not worst.last_share:
            return f"{prices}; in a trial of {MIN_BURST_S * 1000:.0f} ms no probe was hit"
        return (
            f"{prices}; in a trial of {MIN_BURST_S * 1000:.0f} ms the thread hit most (pid {worst.pid}, tid {worst.tid}) "
            f"spent {worst.last_share:.0%} of its time in probes, and so it will as long as every request is counted"
        )

    def _stepped_sites(self) -> list[str]:
        assert self.plane is not None  # noqa: S101 - the caller looked
        sites = [site for process in self.plane.processes.values() for site in process.sites.values()]
        return sorted({site.role for site in sites if site.cost is CostClass.SINGLE_STEPPED})

    def first_burst_s(self) -> float:
        """Seconds until the budget allows the first burst; 0 when there will be none."""
        if self.bursts is None or self.mode is not Mode.BURSTS or not self._has_sites():
            return 0.0
        return self.bursts.governor.next_burst_s(monotonic_ns())

    def _has_sites(self) -> bool:
        return self.plane is not None and any(process.sites for process in self.plane.processes.values())

    def step(self) -> bool:
        """Hear of new devices and queues, and run a burst if one is due; whether there are new accounts."""
        if self.plane is None or self.bursts is None:
            return False
        self.plane.handle_events()
        found = self.plane.accounts() if self.mode is Mode.EXACT else self.bursts.step()
        if found is None:
            return False
        self.take(found)
        return True

    def take(self, accounts: list[QueuePairAccount]) -> None:
        """New accounts, of a burst that was not planned."""
        self._accounts, self._flows = accounts, None

    def flows(
        self,
        owners: Mapping[QpKey, QueueOwner],
        retries: Mapping[str, int],
        step_rates: Mapping[tuple[int, int, int, int, Direction], float] | None = None,
    ) -> list[Flow]:
        """The flows of the accounts as last read; the same ones until there are new accounts: a burst is judged once.

        ``retries`` are a port's signs of loss since the last look, by device.
        """
        if self.plane is None:
            return []
        if self._flows is None:
            self._flows = self._judge(owners, retries, step_rates)
        return self._flows

    def _judge(
        self,
        owners: Mapping[QpKey, QueueOwner],
        retries: Mapping[str, int],
        step_rates: Mapping[tuple[int, int, int, int, Direction], float] | None,
    ) -> list[Flow]:
        seen = [account for account in self._accounts if account.posted or account.completed or account.key in owners]
        devices = self.devices(seen)
        return self._watch.look(
            seen,
            monotonic_ns(),
            exact=self.mode is Mode.EXACT,
            owners=owners,
            devices=devices,
            retries=retries,
            step_rates=step_rates,
        )

    def report(self) -> str:
        """One line about what watching has cost the processes; empty where nothing was probed."""
        if self.bursts is None:
            return ""
        if self.mode is Mode.EXACT:
            return "exact counting: probes were in place all the time"
        going = "every request is counted, for now; " if self.bursts.unbroken else ""
        return going + self.bursts.governor.report(monotonic_ns())

    def worst(self) -> ThreadCost | None:
        """The thread that has paid most."""
        return None if self.bursts is None else self.bursts.governor.worst(monotonic_ns())


def _in_words(error: BaseException) -> str:
    if isinstance(error, TargetGoneError):
        return "the process has ended"
    return str(error) or type(error).__name__
