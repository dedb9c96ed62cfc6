"""Finding what a live process does with RDMA: its opened devices, queue pairs and completion queues, read from its memory.

Three sources, from cheap to dear: its ``/dev/infiniband/uverbs*`` descriptors say how many devices it has open; NCCL's own
device table (``ncclIbDevs``) gives the contexts of a process that runs NCCL; else the writable memory that a heap can lie in is
searched for structures that satisfy every invariant of an ``ibv_context``. Each context found is checked against a descriptor,
so that a look-alike is never taken for one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ncclwatch.target.layout import Layout, MissingMemberError
from ncclwatch.target.maps import Mapping, mapping_at
from ncclwatch.target.memory import MemoryReader, plausible_pointer
from ncclwatch.wire import abi

MAX_DEVICES = 256
"""Bound of NCCL's device table (``MAX_IB_DEVS`` is 16 in v2.18.3-1 and 32 in v2.27.5-1)."""

MAX_SEARCH_MAPPING = 128 << 20
"""Larger anonymous mappings are no heap: glibc's arenas are 64 MiB; contexts are under 1 MiB. ``[heap]`` has no bound of its
own."""
MAX_SEARCH = 1 << 30
"""Bytes searched at most in one process."""
CHUNK = 4 << 20

_UVERBS = "uverbs"


@dataclass(frozen=True, slots=True)
class VerbsFile:
    """An open ``/dev/infiniband/uverbsN`` of a process: descriptor number, the uverbs device and the RDMA device behind it."""

    fd: int
    uverbs: str
    device: str


@dataclass(frozen=True, slots=True)
class QueuePair:
    """A queue pair (``struct ibv_qp``). ``extended`` are the function pointers of ``struct ibv_qp_ex``, empty for a plain one."""

    address: int
    context: int
    number: int
    send_cq: int
    recv_cq: int
    type: int
    extended: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionQueue:
    """An extended completion queue (``struct ibv_cq_ex``) with its function pointers."""

    address: int
    context: int
    extended: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class VerbsContext:
    """One opened device (``struct ibv_context``).

    ``functions`` are the addresses of the provider's functions by the name of their member in ``ibv_context_ops``. ``found_by``
    is ``nccl`` (its device table) or ``memory``. ``port`` is the port NCCL uses, 0 when unknown.
    """

    address: int
    device: str
    fd: int
    functions: dict[str, int] = field(hash=False)
    found_by: str
    port: int = 0


def verbs_files(pid: int, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> list[VerbsFile]:
    """The RDMA devices a process has open, by the device numbers of its descriptors; works across mount namespaces.

    A descriptor that goes away meanwhile is left out.
    """
    found = []
    try:
        entries = sorted((proc / str(pid) / "fd").iterdir(), key=lambda path: int(path.name))
    except OSError:
        return []
    for entry in entries:
        try:
            if _UVERBS not in str(entry.readlink()):
                continue
            number = entry.stat().st_rdev
        except OSError:
            continue
        folder = sys / "dev" / "char" / f"{os.major(number)}:{os.minor(number)}"
        try:
            device = (folder / "ibdev").read_text().strip()
            name = folder.resolve().name
        except OSError:
            continue
        if name.startswith(_UVERBS):
            found.append(VerbsFile(int(entry.name), name, device))
    return found


def find_contexts(
    reader: MemoryReader, files: Sequence[VerbsFile], layout: Layout | None = None, bias: int = 0, *, quick: bool = False
) -> list[VerbsContext]:
    """The contexts behind the open devices of a process, sorted by address.

    ``layout`` and ``bias`` (load bias in bytes) are those of the process's NCCL, when it has one. A device that libibverbs
    opened but whose context was not found is missing from the result: compare the ``fd``s. ``quick``: where NCCL's own table has
    any, memory is not searched for others.
    """
    space = _Space(reader, files)
    found: dict[int, VerbsContext] = {}
    if layout is not None:
        for address, port in _nccl_devices(reader, layout, bias):
            context = space.context(address, "nccl", port)
            if context is not None:
                found.setdefault(address, context)
    if not (quick and found) and {file.fd for file in files} - {context.fd for context in found.values()}:
        for address in _search_contexts(reader, space):
            context = space.context(address, "memory", 0)
            if context is not None:
                found.setdefault(address, context)
    return sorted(found.values(), key=lambda context: context.address)


def context_at(reader: MemoryReader, files: Sequence[VerbsFile], address: int) -> VerbsContext | None:
    """The context at an address that an API call gave away, or ``None`` when there is none."""
    return _Space(reader, files).context(address, "call", 0)


class _Space:
    """The checks a candidate for a context must pass."""

    def __init__(self, reader: MemoryReader, files: Sequence[VerbsFile]) -> None:
        self.reader = reader
        self._devices = {file.fd: file.device for file in files}
        self.mappings = reader.mappings()
        code = sorted((m.start, m.end) for m in self.mappings if m.executable and m.is_file)
        self.code_starts = np.array([start for start, _ in code], dtype=np.uint64)
        self.code_ends = np.array([end for _, end in code], dtype=np.uint64)

    def is_code(self, words: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which words point into code of a file."""
        if not len(self.code_starts):
            return np.zeros(len(words), dtype=np.bool_)
        index = np.searchsorted(self.code_starts, words, side="right") - 1
        ends = self.code_ends[np.maximum(index, 0)]
        return np.asarray((index >= 0) & (words < ends))

    def is_function(self, address: int) -> bool:
        mapping = mapping_at(self.mappings, address)
        return mapping is not None and mapping.executable and mapping.is_file

    def context(self, address: int, found_by: str, port: int) -> VerbsContext | None:
        if not plausible_pointer(address):
            return None
        (data,) = self.reader.read_many([(address, abi.CONTEXT_SIZE)])
        if data is None:
            return None
        functions = {name: _word(data, abi.CONTEXT_OPS + index * abi.POINTER) for name, index in abi.OPS.items()}
        fd = struct.unpack_from("<i", data, abi.CONTEXT_CMD_FD)[0]
        if fd not in self._devices or _word(data, abi.CONTEXT_ABI_COMPAT) != abi.ABI_IS_EXTENDED:
            return None
        if not all(self.is_function(functions[name]) for name in ("post_send", "post_recv", "poll_cq")):
            return None
        if self._device_name(_word(data, abi.CONTEXT_DEVICE)) != self._devices[fd]:
            return None
        return VerbsContext(address, self._devices[fd], fd, functions, found_by, port)

    def _device_name(self, device: int) -> str:
        if not plausible_pointer(device):
            return ""
        (data,) = self.reader.read_many([(device + abi.DEVICE_NAME, abi.DEVICE_NAME_SIZE)])
        return "" if data is None else data.split(b"\0", 1)[0].decode("ascii", "replace")


def _word(data: bytes, offset: int) -> int:
    value: int = struct.unpack_from("<Q", data, offset)[0]
    return value


def _nccl_devices(reader: MemoryReader, layout: Layout, bias: int) -> Iterator[tuple[int, int]]:
    """(context, port) of the entries of NCCL's device table; nothing when this build or process has none."""
    table, count = layout.symbols.get("ncclIbDevs"), layout.symbols.get("ncclNIbDevs")
    if table is None or count is None:
        return
    try:
        size = layout.size("ncclIbDev")
        context = layout.member("ncclIbDev.context").offset
        port = layout.member("ncclIbDev.portNum") if layout.has("ncclIbDev.portNum") else layout.member("ncclIbDev.port")
    except MissingMemberError:
        return
    (number,) = reader.read_many([(bias + count[0], 4)])
    if number is None or size <= 0:
        return
    devices = min(struct.unpack("<i", number)[0], table[1] // size, MAX_DEVICES)
    for index in range(max(devices, 0)):
        base = bias + table[0] + index * size
        pointer, port_number = reader.read_many([(base + context, abi.POINTER), (base + port.offset, 1)])
        if pointer is not None:
            yield _word(pointer, 0), port_number[0] if port_number else 0


def _search_contexts(reader: MemoryReader, space: _Space) -> Iterator[int]:
    """Addresses in writable memory where every invariant that one pass can check holds."""
    back = abi.CONTEXT_ABI_COMPAT // 8
    offsets = [(abi.CONTEXT_OPS // 8 + abi.OPS[name]) - back for name in ("post_send", "post_recv", "poll_cq")]
    for base, words in _search_space(reader):
        hits = np.flatnonzero(words == np.uint64(abi.ABI_IS_EXTENDED))
        hits = hits[hits >= back]
        for offset in offsets:
            hits = hits[space.is_code(words[hits + offset])]
        for hit in hits.tolist():
            yield base + (hit - back) * 8


def find_queues(reader: MemoryReader, contexts: Iterable[VerbsContext]) -> tuple[list[QueuePair], list[CompletionQueue]]:
    """All queue pairs, and the extended ones among the completion queues, that belong to these contexts.

    Both begin with a pointer to their context: memory is searched for such words, and each candidate must have a protection
    domain and completion queues of the same context. Sorted by address.
    """
    addresses = sorted(context.address for context in contexts)
    if not addresses:
        return [], []
    space = _Space(reader, ())
    wanted = np.array(addresses, dtype=np.uint64)
    candidates: list[int] = []
    for base, words in _search_space(reader):
        candidates += [base + hit * 8 for hit in np.flatnonzero(np.isin(words, wanted)).tolist()]
    owners = dict(zip(candidates, _words(reader, candidates), strict=True))
    pairs = [pair for address in candidates if (pair := _queue_pair(reader, space, address, owners)) is not None]
    queues = [queue for address in candidates if (queue := _extended_queue(reader, space, address)) is not None]
    return sorted(pairs, key=lambda pair: pair.address), sorted(queues, key=lambda queue: queue.address)


def queue_pair_at(reader: MemoryReader, address: int) -> QueuePair | None:
    """The queue pair at an address that an API call or NCCL's own structures gave away."""
    return _queue_pair(reader, _Space(reader, ()), address, {})


def _queue_pair(reader: MemoryReader, space: _Space, address: int, owners: dict[int, int]) -> QueuePair | None:
    (data,) = reader.read_many([(address, abi.QP_SIZE)])
    if data is None:
        return None
    context, pd, send_cq, recv_cq = (_word(data, at) for at in (abi.QP_CONTEXT, abi.QP_PD, abi.QP_SEND_CQ, abi.QP_RECV_CQ))
    number, state, kind = struct.unpack_from("<III", data, abi.QP_NUM)
    if kind not in abi.QpType.__members__.values() or state not in abi.QpState.__members__.values() or not 0 < number < 1 << 24:
        return None
    for pointer in (pd, send_cq, recv_cq):
        if not plausible_pointer(pointer):
            return None
        if (owners.get(pointer) or _words(reader, [pointer])[0]) != context:
            return None
    functions = _functions(reader, space, address, abi.QP_EX, abi.QP_EX_SIZE)
    extended = functions if set(abi.QP_EX_REQUIRED) <= {name for name, _ in functions} else ()
    return QueuePair(address, context, number, send_cq, recv_cq, kind, extended)


def _extended_queue(reader: MemoryReader, space: _Space, address: int) -> CompletionQueue | None:
    functions = _functions(reader, space, address, abi.CQ_EX, abi.CQ_EX_SIZE)
    if not {"start_poll", "next_poll", "end_poll"} <= {name for name, _ in functions}:
        return None
    return CompletionQueue(address, _words(reader, [address])[0], functions)


def _functions(
    reader: MemoryReader, space: _Space, address: int, members: dict[str, int], size: int
) -> tuple[tuple[str, int], ...]:
    """The members of an extended structure that point to code; empty as soon as one points elsewhere."""
    (data,) = reader.read_many([(address, size)])
    if data is None:
        return ()
    pointers = {name: _word(data, offset) for name, offset in members.items()}
    if any(pointer and not space.is_function(pointer) for pointer in pointers.values()):
        return ()
    return tuple((name, pointer) for name, pointer in pointers.items() if pointer)


def _words(reader: MemoryReader, addresses: list[int]) -> list[int]:
    parts = reader.read_many([(address, abi.POINTER) for address in addresses])
    return [_word(part, 0) if part is not None else 0 for part in parts]


def _search_space(reader: MemoryReader) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    """(address, words) of the memory a heap can lie in, in chunks that overlap by more than the largest structure."""
    overlap = 4096
    budget = MAX_SEARCH
    for mapping in reader.mappings():
        if not _can_hold_objects(mapping):
            continue
        for start, size in reader.resident(mapping.start, mapping.end):
            # A structure may begin on a page that is resident and end on the next run; runs are searched with a page around them.
            begin, end = max(mapping.start, start - overlap), min(mapping.end, start + size + overlap)
            while begin < end and budget > 0:
                words = _as_words(reader.scan(begin, min(CHUNK, end - begin)))
                budget -= CHUNK
                if len(words):
                    yield begin, words
                begin += CHUNK - overlap if end - begin > CHUNK else end - begin


def _as_words(data: NDArray[np.uint64] | bytes | None) -> NDArray[np.uint64]:
    if data is None:
        return np.empty(0, dtype=np.uint64)
    if isinstance(data, bytes):
        return np.frombuffer(data[: len(data) // 8 * 8], dtype="<u8").astype(np.uint64, copy=False)
    return data.copy()


def _can_hold_objects(mapping: Mapping) -> bool:
    if not (mapping.writable and mapping.readable) or mapping.is_file or mapping.executable or mapping.shared:
        return False
    return mapping.path == "[heap]" or (mapping.path in ("", "[anon]") and mapping.size <= MAX_SEARCH_MAPPING)
