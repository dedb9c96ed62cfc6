"""One look at one process: communicators, proxy operations and connections put together into a sample.

Runs the same on a live process, on one that is being recorded and on a recorded image; what differs is the reader.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ncclwatch.model.state import Communicator, CpuLimit, ProcessInfo, ProcessSample
from ncclwatch.target.commstate import CommReader, CommState
from ncclwatch.target.communicators import Finder
from ncclwatch.target.decode import Decoder
from ncclwatch.target.hostconn import read_host_connections
from ncclwatch.target.layout import Layout
from ncclwatch.target.memory import MemoryReader
from ncclwatch.target.netdev import NetDevices
from ncclwatch.target.netsteps import read_net_steps
from ncclwatch.target.proxy import ProxyReader
from ncclwatch.target.read_ahead import NotFetchedError, ReadAhead

FIRST_SEARCH_S = 5.0
"""Longest search for the first communicator of a process; what remains is looked through bit by bit in later samples."""

SEARCH_BYTES = 4 << 20
"""Bytes that one sample of a running session searches at most for communicators made since (about a millisecond)."""

SEARCH_S = 0.002
"""Longest time of such a step."""

RESTART_BYTES = 256 << 20
RESTART_S = 0.05
"""What a sample spends when there are signs of a new communicator."""

RETRY_INTERVAL_S = 5.0
"""How often the likely places are looked at again while proxies serve more communicators than are known."""

CHECK_INTERVAL_S = 1.0
"""Samples nearer together than this look for new communicators once."""

CREATION_S = 20.0
"""For how long a communicator that is being made is looked for: NCCL sets it up some time after the call (devices, plugins)."""

RESEARCH_INTERVAL_S = 30.0
"""How long after one complete search the next begins, where NCCL keeps no list of its own."""


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What the kernel says of a process at the moment of a sample; times as in :class:`ProcessSample`."""

    time_ns: int
    wall_ns: int
    run_state: str
    cpu_time_ns: int | None = None
    context_switches: int | None = None
    threads: int | None = None
    run_queue_wait_ns: int | None = None
    cpu_limit: CpuLimit | None = None


class Sampler:
    """Takes samples of one process through a reader.

    ``load_bias`` is what to add to the symbols' addresses, or ``None`` when unknown. ``keep`` says whether what hardly changes
    is kept between samples; a recorder must read everything each time.
    """

    def __init__(
        self,
        reader: MemoryReader,
        layout: Layout,
        load_bias: int | None,
        *,
        library: tuple[int, int] | None = None,
        keep: bool = True,
    ) -> None:
        self._ahead = ReadAhead(reader) if keep else None
        self.reader: MemoryReader = self._ahead or reader
        self.layout = layout
        self._keep = keep
        self.decoder = Decoder(self.reader, layout)
        self._comm_reader = CommReader(self.decoder, 5.0 if keep else 0.0)
        self.finder = Finder(self.decoder, self._comm_reader, load_bias, library)
        self._net_devices = NetDevices(self.decoder, load_bias)
        self._next_check = 0.0
        self._next_step = 0.0
        self._next_retry = 0.0
        self._signs: tuple[int | None, int] | None = None
        self._creation: tuple[float, int] | None = None

    states: tuple[CommState, ...] = ()
    """The communicators of the last sample with their connectors."""

    def search(self, seconds: float = FIRST_SEARCH_S, *, everything: bool = False) -> bool:
        """Look for communicators until what is found accounts for all proxies (or ``everything`` was looked at), or time is up.

        Whether at least one is there.
        """
        self.reader.check()
        done = self.finder.search(1 << 62, time.monotonic() + seconds, stop_when_consistent=not everything)
        self._next_check = time.monotonic() + CHECK_INTERVAL_S
        # Not equal to what the first check sees: a communicator made since the search must not become part of the baseline.
        self._signs = (None, self.finder.expected())
        if done:
            self._next_step = time.monotonic() + RESEARCH_INTERVAL_S
        return bool(self.finder.found)

    def expect(self, addresses: Mapping[int, str]) -> bool:
        """Take addresses that are known from elsewhere (an API call, a recording); whether communicators are at all of them."""
        return sum(not self.finder.hint(address, how) for address, how in addresses.items()) == 0

    def creation_begun(self) -> None:
        """An API call has begun to make a communicator: the next samples look for it until there is one more."""
        self._creation = (time.monotonic() + CREATION_S, len(self.finder.found))

    def fetch(self) -> None:
        """Read now what the next sample needs, and decode it only then: processes fetched one after the other show one moment."""
        if self._ahead is not None:
            self._ahead.fetch()

    def sample(self, info: ProcessInfo, facts: ProcessFacts) -> ProcessSample:
        """One sample, of the moment of :meth:`fetch` where that brought all; raises
        :class:`ncclwatch.errors.TargetGoneError` when the process went away, also in the middle.
        """
        ahead = self._ahead
        if ahead is None:
            return self._sample(info, facts)
        try:
            if (fetched := ahead.begin_fetched()) is not None:
                with contextlib.suppress(NotFetchedError):
                    return replace(self._sample(info, facts), **fetched._asdict())
            ahead.begin()
            return self._sample(info, facts)
        finally:
            ahead.end()

    def _sample(self, info: ProcessInfo, facts: ProcessFacts) -> ProcessSample:
        begin = time.monotonic_ns()
        self.decoder.begin()
        self._comm_reader.begin()
        self._net_devices.begin(keep=self._keep)
        self.reader.check()
        self._refresh_finder(facts)
        if self._ahead is not None:
            # Looking for communicators goes on wherever it was left, and is not done twice: it may read what it wants.
            self._ahead.only_fetched()
        comms = [state for a, how in sorted(self.finder.found.items()) if (state := self._comm_reader.read(a, how)) is not None]
        self.states = tuple(comms)
        view = ProxyReader(self.decoder, comms, self._comm_reader, self._net_devices).read_all()
        if view.strangers:
            self._comm_reader.connectors.wish(view.strangers)
            self._comm_reader.forget()
        records = tuple(self._with_connections(state, view.full.get(state.proxy_state)) for state in comms)
        self.reader.check()
        return ProcessSample(
            process=with_rank(info, records),
            time_ns=facts.time_ns,
            wall_ns=facts.wall_ns,
            duration_ns=time.monotonic_ns() - begin,
            run_state=facts.run_state,
            communicators=records,
            operations=view.operations,
            pending=view.pending,
            torn=self.decoder.torn,
            truncated=tuple(self.decoder.truncated),
            unavailable=dict(self.decoder.unavailable),
            cpu_time_ns=facts.cpu_time_ns,
            context_switches=facts.context_switches,
            run_queue_wait_ns=facts.run_queue_wait_ns,
            cpu_limit=facts.cpu_limit,
        )

    def _refresh_finder(self, facts: ProcessFacts) -> None:
        """Drop communicators that are gone and look for new ones, cheaply.

        A new communicator brings threads of its own, or another reference to a proxy: then the likely places are looked at
        again at once.
        """
        finder = self.finder
        finder.revalidate()
        now = time.monotonic()
        creating = self._is_creating(now)
        # NCCL's own list holds a communicator only once its ranks have met.
        if finder.kept_by_nccl() and not creating:
            return
        if self._keep and now >= self._next_check:
            self._next_check = now + CHECK_INTERVAL_S
            signs = (facts.threads, finder.expected())
            # A process without any may be making its first, of which nothing outside its memory tells.
            unmatched = (len(finder.found) < signs[1] or not finder.found) and now >= self._next_retry
            if creating or unmatched or (self._signs is not None and signs != self._signs):
                self._next_retry = now + RETRY_INTERVAL_S
                finder.restart()
                if not finder.search(RESTART_BYTES, now + RESTART_S, stop_when_consistent=True, kept_is_all=not creating):
                    self._next_step = now
                signs = (facts.threads, finder.expected())
            elif now >= self._next_step and finder.search(SEARCH_BYTES, now + SEARCH_S):
                self._next_step = now + RESEARCH_INTERVAL_S
            self._signs = signs
        if finder.is_partial:
            scanned = finder.report.bytes_scanned >> 20
            self.decoder.truncated[f"communicators: {scanned} MiB of memory searched so far"] = None

    def _is_creating(self, now: float) -> bool:
        if self._creation is not None and (now > self._creation[0] or len(self.finder.found) > self._creation[1]):
            self._creation = None
        return self._creation is not None

    def _with_connections(self, state: CommState, proxy_pool_full: bool | None) -> Communicator:
        return replace(
            state.record,
            proxy_pool_full=proxy_pool_full,
            host_connections=read_host_connections(self.decoder, state.record.address, state.connectors),
            net_steps=read_net_steps(self.decoder, state.connectors),
        )


def with_rank(info: ProcessInfo, communicators: tuple[Communicator, ...]) -> ProcessInfo:
    """The process with the job's rank taken from its largest communicator, where the environment names none."""
    if info.rank is not None or not communicators:
        return info
    largest = max(communicators, key=lambda c: (c.nranks, -c.address))
    return replace(
        info,
        rank=largest.rank,
        world_size=largest.nranks if info.world_size is None else info.world_size,
        local_rank=largest.local_rank if info.local_rank is None else info.local_rank,
        rank_source="communicator",
    )
