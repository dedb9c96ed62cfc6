"""Finding the communicators of a process.

In order of cost: what NCCL itself keeps (the array of the RAS subsystem, 2.24 and later), then the memory that can hold one,
likeliest first, looked through for the magics (2.21 and later) or for self-pointers (before). What is found is kept and
revalidated each time; the search goes on where it stopped, within a budget of bytes a call, so that no single sample takes long.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclwatch.target.commstate import MAGIC, CommReader, sane_header
from ncclwatch.target.decode import Decoder, Values
from ncclwatch.target.maps import Mapping, mapping_at
from ncclwatch.target.memory import PAGE_SIZE, Range
from ncclwatch.target.roots import pointers, proxy_states, read_windows, stack_windows

MAX_COMMUNICATORS = 1024
"""Communicators of one process that are kept; a large Megatron job has some dozens."""

MAX_KEPT_BY_RAS = 1 << 16
"""Entries of NCCL's own array of communicators that are read."""

CHUNK = 1 << 20
"""Bytes searched at a time: fits the cache, and 256 pages cost the kernel few lock round trips."""

NEAR = 4 << 20
"""Bytes to both sides of a known proxy that are looked at before anything else."""

HUGE = 256 << 20
"""A mapping larger than this holds tensors or pinned buffers, not malloc's small chunks: looked at last, page by page."""

ALIGNMENT = 16
"""malloc's, and so a communicator's."""


@dataclass(slots=True)
class SearchReport:
    """What one search cost and whether everything that can hold a communicator was looked at."""

    bytes_scanned: int = 0
    pages_probed: int = 0
    seconds: float = 0.0
    complete: bool = False
    stages: list[str] = field(default_factory=list)


class Finder:
    """Finds the communicators of one process; ``found`` maps address → how (``kept-by-nccl``, ``magic``, ``invariants``,
    ``hint``).
    """

    def __init__(
        self, decoder: Decoder, comm_reader: CommReader, load_bias: int | None, library: tuple[int, int] | None = None
    ) -> None:
        self._decoder = decoder
        self._comm_reader = comm_reader
        self._bias = load_bias
        self._library = library
        self._proxies: dict[int, int] = {}
        self.found: dict[int, str] = {}
        self.report = SearchReport()
        self._has_magic = decoder.layout.has("ncclComm.startMagic") and decoder.layout.has("ncclComm.endMagic")
        self._pending: Iterator[None] | None = None

    def hint(self, address: int, how: str = "hint") -> bool:
        """Take an address that somebody saw in an API call; whether a live communicator is there."""
        return self._accept(address, how)

    def revalidate(self) -> None:
        """Drop what is no communicator any more."""
        gone = [address for address in self.found if not self._is_live(address)]
        for address in gone:
            del self.found[address]

    @property
    def is_partial(self) -> bool:
        """Whether a search was begun, is not at its end, and what was found does not account for all proxies."""
        return self._pending is not None and not self.is_consistent()

    def is_consistent(self) -> bool:
        """Whether as many communicators are known as the process's proxies serve (``ncclProxyState.refCount``): then all that
        communicate are found. False when the proxies are not known.
        """
        serving: dict[int, int] = {}
        for address in self.found:
            proxy = (self._comm_reader.header(address) or {}).get("proxyState") or 0
            serving[proxy] = serving.get(proxy, 0) + 1
        return bool(self._proxies) and all(serving.get(proxy, 0) >= count for proxy, count in self._proxies.items())

    def restart(self) -> None:
        """Begin anew with the next search: something says that there are other communicators than before."""
        self._pending = None

    def expected(self) -> int:
        """Communicators that the known proxies serve now, by their reference counts (read anew); proxies that are gone do not
        count.
        """
        if not self._proxies:
            return 0
        wanted = self._decoder.fields("ncclProxyState", ("refCount",))
        found = self._decoder.structures(wanted, list(self._proxies))
        self._proxies = {
            address: values["refCount"] or 1
            for address, values in zip(self._proxies, found, strict=True)
            if values is not None and 0 < (values["refCount"] or 1) <= MAX_COMMUNICATORS
        }
        return sum(self._proxies.values())

    def search(self, byte_budget: int, deadline: float, *, stop_when_consistent: bool = False, kept_is_all: bool = True) -> bool:
        """Go on searching until done, ``byte_budget`` bytes were looked at, or ``time.monotonic()`` passes ``deadline``.

        ``stop_when_consistent`` ends the call as soon as :meth:`is_consistent`. With ``kept_is_all`` what NCCL lists is taken for
        all there is: it is, but for communicators in creation. Returns whether the search came to its end.
        """
        begin = time.monotonic()
        if self._pending is None:
            self.report = SearchReport()
            self._pending = self._stages(kept_is_all)
        limit = self.report.bytes_scanned + byte_budget
        finished = True
        known = -1
        for _ in self._pending:
            if stop_when_consistent and len(self.found) != known:
                known = len(self.found)
                if self.is_consistent():
                    finished = False
                    break
            if self.report.bytes_scanned >= limit or time.monotonic() >= deadline:
                finished = False
                break
        if finished:
            self._pending = None
            self.report.complete = True
        self.report.seconds += time.monotonic() - begin
        return finished

    def kept_by_nccl(self) -> bool:
        """Take the communicators NCCL's RAS subsystem lists (``ncclComms``, src/ras/ras.cc since v2.24.3-1); whether it keeps
        any.
        """
        symbols = self._decoder.layout.symbols
        if self._bias is None or "ncclComms" not in symbols or "nNcclComms" not in symbols:
            return False
        count = self._decoder.words(symbols["nNcclComms"][0] + self._bias, 1, 4)
        table = self._decoder.words(symbols["ncclComms"][0] + self._bias, 1)
        if not count or not table or not 0 < count[0] <= MAX_KEPT_BY_RAS:
            return False
        entries = self._decoder.words(table[0], count[0]) or ()
        return sum(self._accept(address, "kept-by-nccl") for address in entries if address) > 0

    def _accept(self, address: int, how: str) -> bool:
        if address in self.found:
            return True
        if len(self.found) >= MAX_COMMUNICATORS:
            self._decoder.truncated[f"communicators: the first {MAX_COMMUNICATORS}"] = None
            return False
        if address % ALIGNMENT or not self._is_live(address):
            return False
        self.found[address] = how
        self._accept_clique(address)
        return True

    def _accept_clique(self, address: int) -> None:
        """The communicators of the same process that share its hash (several GPUs a process): ``intraComm0``, then by
        ``intraNext``.
        """
        for _ in range(MAX_COMMUNICATORS):
            values = self._comm_reader.header(address) or {}
            relatives = [values.get(name) or 0 for name in ("intraComm0", "intraNext")]
            news = [relative for relative in relatives if relative and relative not in self.found]
            if not news or not sum(self._accept(relative, self.found[address]) for relative in news):
                return
            address = relatives[1]

    def _is_live(self, address: int) -> bool:
        values = self._comm_reader.header(address)
        if values is None or not sane_header(values):
            return False
        return self._has_magic or self._satisfies_invariants(address, values)

    def _satisfies_invariants(self, address: int, values: Values) -> bool:
        """Before 2.21 there are no magics: what only a communicator satisfies.

        Its shared resources are owned by a readable communicator (itself unless it shares its parent's), its own entry in
        ``peerInfo`` points back at it and names the same device, and channels know their index.
        """
        decoder, layout = self._decoder, self._decoder.layout
        if not all(decoder.is_readable(values[name] or 0) for name in ("sharedRes", "abortFlag")):
            return False
        owner = decoder.structure(decoder.fields("ncclSharedResources", ("owner", "tpNRanks")), values["sharedRes"] or 0)
        if owner is None or not decoder.is_readable(owner["owner"] or 0):
            return False
        if owner["tpNRanks"] is not None and not 0 <= owner["tpNRanks"] <= 1 << 20:
            return False
        rank, peers = values["rank"] or 0, values["peerInfo"] or 0
        if peers and layout.has("ncclPeerInfo.comm"):
            wanted = decoder.fields("ncclPeerInfo", ("rank", "comm", "busId"))
            mine = decoder.structure(wanted, peers + rank * wanted.size)
            # During initialisation the entry is still empty.
            return mine is not None and (
                (mine["comm"] == address and mine["rank"] == rank) or (mine["comm"] == 0 and mine["rank"] == 0)
            )
        return owner["owner"] == address

    # -- searching ---------------------------------------------------------------------------------------------------------------

    def _stages(self, kept_is_all: bool) -> Iterator[None]:
        """The search as a sequence of small steps."""
        if self.kept_by_nccl() and kept_is_all:
            self.report.stages.append("kept by NCCL")
            return
        yield from self._follow_roots()
        ordinary, huge = self._candidates()
        self.report.stages.append(f"{len(ordinary)} mappings")
        for start, end in ordinary:
            yield from self._scan_range(start, end)
        if huge:
            self.report.stages.append(f"{len(huge)} huge mappings")
        for start, end in huge:
            yield from self._probe_range(start, end)
        # Other allocators than the C library's carve small structures out of huge mappings too.
        for start, end in huge:
            yield from self._scan_range(start, end)

    def _follow_roots(self) -> Iterator[None]:
        """Pointers on the threads' stacks, and the proxies they serve (see :mod:`ncclwatch.target.roots`)."""
        reader = self._decoder.reader
        reader.refresh_mappings()
        stacks = read_windows(self._decoder, stack_windows(reader.mappings()))
        self.report.stages.append(f"{len(stacks)} stacks")
        if self._library is not None:
            proxies = proxy_states(self._decoder, stacks, self._library)
            self._proxies = {address: values["refCount"] or 1 for address, values in proxies.items()}
            for values in proxies.values():
                # ncclProxyState.comm: v2.30 and later.
                self._accept(values["comm"] or 0, "kept-by-nccl")
        yield
        for candidate in self._probe(pointers(stacks, ALIGNMENT)):
            self._accept(candidate, "magic" if self._has_magic else "invariants")
        yield
        # A communicator and its proxy are allocated one after the other (commAlloc, src/init.cc): mostly they are neighbours.
        for proxy in self._proxies:
            home = mapping_at(reader.mappings(), proxy)
            if home is not None:
                yield from self._scan_range(max(home.start, proxy - NEAR), min(home.end, proxy + NEAR))

    def _candidates(self) -> tuple[list[Range], list[Range]]:
        """(start, end) of the writable anonymous memory: what malloc uses first, then by size; and what is too large to be
        malloc's.
        """
        self._decoder.reader.refresh_mappings()
        possible = [m for m in self._decoder.reader.mappings() if can_hold_communicators(m)]
        heap = [(m.start, m.end) for m in possible if m.path == "[heap]"]
        others = sorted(((m.start, m.end) for m in possible if m.path != "[heap]"), key=lambda r: r[1] - r[0])
        ordinary = [r for r in others if r[1] - r[0] <= HUGE]
        return heap + ordinary, [r for r in others if r[1] - r[0] > HUGE]

    def _scan_range(self, start: int, end: int) -> Iterator[None]:
        for run_start, run_size in self._resident(start, end):
            for address in range(run_start, run_start + run_size, CHUNK):
                size = min(CHUNK, run_start + run_size - address)
                words = self._decoder.reader.scan(address, size)
                self.report.bytes_scanned += size
                for candidate in self._matches(words, address):
                    self._accept(candidate, "magic" if self._has_magic else "invariants")
                yield

    def _probe_range(self, start: int, end: int) -> Iterator[None]:
        """A chunk that malloc got by mmap of its own begins 16 bytes into a page, also where the kernel merged mappings."""
        for run_start, run_size in self._resident(start, end):
            for address in range(run_start, run_start + run_size, CHUNK):
                pages = np.arange(address, min(address + CHUNK, run_start + run_size), PAGE_SIZE, dtype=np.uint64)
                self.report.bytes_scanned += len(pages) * PAGE_SIZE
                self.report.pages_probed += len(pages)
                for candidate in self._probe(pages + np.uint64(ALIGNMENT)):
                    self._accept(candidate, "magic" if self._has_magic else "invariants")
                yield

    def _resident(self, start: int, end: int) -> Iterator[Range]:
        window = 64 << 20
        for low in range(start, end, window):
            yield from self._decoder.reader.resident(low, min(low + window, end))

    def _matches(self, words: NDArray[np.uint64], address: int) -> list[int]:
        """Addresses (16-aligned) in ``words``, which begin at ``address``, that look like a communicator's start."""
        if self._has_magic:
            hits = np.flatnonzero(words[::2] == np.uint64(MAGIC))
            return [address + ALIGNMENT * hit for hit in hits.tolist()]
        return self._self_pointers(words, address)

    def _self_pointers(self, words: NDArray[np.uint64], address: int) -> list[int]:
        """``comm->intraComm0 == comm``: the leader of the communicators of one process is itself, and there is one GPU a
        process mostly.

        The others of the process follow from it by ``intraNext`` (see ``_accept_clique``).
        """
        offset = self._decoder.layout.member("ncclComm.intraComm0").offset
        first = (offset % ALIGNMENT) // 8
        places = np.arange(first, len(words), 2)
        targets = words[first::2]
        own = places.astype(np.uint64) * np.uint64(8) + np.uint64(address) - np.uint64(offset)
        return [int(target) for target in targets[targets == own]]

    def _probe(self, starts: NDArray[np.uint64]) -> list[int]:
        """Which of many addresses look like a communicator's start."""
        if self._has_magic:
            return [int(start) for start in starts[self._decoder.reader.probe(starts) == np.uint64(MAGIC)]]
        offset = np.uint64(self._decoder.layout.member("ncclComm.intraComm0").offset)
        return [int(start) for start in starts[self._decoder.reader.probe(starts + offset) == starts]]


def can_hold_communicators(mapping: Mapping) -> bool:
    """Whether malloc can have put a communicator there: private writable anonymous memory that is no stack.

    Device mappings, files, System V and POSIX shared memory and huge-page file mappings cannot.
    """
    if not (mapping.readable and mapping.writable) or mapping.shared or mapping.inode:
        return False
    return mapping.path in ("", "[heap]") or mapping.path.startswith("[anon")
