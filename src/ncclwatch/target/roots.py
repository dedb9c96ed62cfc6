"""Where pointers to communicators and proxies lie without searching: the stacks of the process's threads.

NCCL starts one service thread for each proxy (``ncclProxyService(proxyState)``, src/proxy.cc), and the C library keeps a
thread's function and argument at the top of its stack. That gives every live proxy, whose reference count says how many
communicators to look for; and the frames of the threads that call NCCL often still hold the communicators themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ncclwatch.model.rows import distinct
from ncclwatch.target.decode import Decoder, Values
from ncclwatch.target.layout import MissingMemberError
from ncclwatch.target.maps import Mapping
from ncclwatch.target.memory import ADDRESS_LIMIT, LOWEST_ADDRESS, UnreadableError

THREAD_TOP = 16 << 10
"""Bytes at the top of a thread's stack that hold the C library's descriptor (2.3 KiB) below the thread-local storage."""

FRAMES = 128 << 10
"""Bytes of a stack, from its top down, in which pointers are looked for."""

MAX_STACKS = 2048
MAX_ROOTS = 1 << 16
"""Stacks and words that are followed at most."""

_PROXY = ("refCount", "comm", "tpRank", "tpnRanks", "tpLocalnRanks", "cudaDev", "abortFlag", "ncclNet")
_THREAD_STATE = 32
"""Bytes of a ``std::thread`` state that are looked at: its vtable, then function and argument in either order (NCCL 2.28 and
later).
"""


def stack_windows(mappings: Sequence[Mapping]) -> list[tuple[int, int]]:
    """(start, end) of what can be the top of a thread's stack: below it lies a guard that nobody may touch."""
    windows = []
    for below, stack in pairwise(mappings):
        is_main = stack.path.startswith("[stack")
        guarded = below.end == stack.start and below.perms.startswith("---")
        if stack.readable and stack.writable and not stack.shared and not stack.inode and (is_main or guarded):
            windows.append((max(stack.start, stack.end - FRAMES), stack.end))
    return windows[-MAX_STACKS:]


def read_windows(decoder: Decoder, windows: Sequence[tuple[int, int]]) -> list[NDArray[np.uint64]]:
    """The resident words of each window, those of unread pages 0."""
    found = []
    for start, end in windows:
        words = np.zeros((end - start) // 8, dtype=np.uint64)
        for address, size in decoder.reader.resident(start, end):
            try:
                data = decoder.reader.read(address, size)
            except UnreadableError:
                continue
            first = (address - start) // 8
            words[first : first + size // 8] = np.frombuffer(data, dtype=np.uint64)
        found.append(words)
    return found


def pointers(stacks: Sequence[NDArray[np.uint64]], alignment: int) -> NDArray[np.uint64]:
    """The distinct words that can be pointers of that alignment."""
    if not stacks:
        return np.empty(0, dtype=np.uint64)
    words = distinct(np.concatenate(stacks))
    possible = (words >= LOWEST_ADDRESS) & (words < ADDRESS_LIMIT) & (words % np.uint64(alignment) == 0)
    found: NDArray[np.uint64] = words[possible][:MAX_ROOTS]
    return found


def proxy_states(decoder: Decoder, stacks: Sequence[NDArray[np.uint64]], library: tuple[int, int]) -> dict[int, Values]:
    """The live proxies of the threads whose stacks these are: address → members. ``library`` is (start, end) of the NCCL
    binary.
    """
    mappings = decoder.reader.mappings()
    code = _ranges(m for m in mappings if m.executable and library[0] <= m.start and m.end <= library[1])
    try:
        wanted = decoder.fields("ncclProxyState", _PROXY)
    except MissingMemberError:
        return {}
    arguments: set[int] = set()
    holders: list[int] = []
    executable = _ranges(m for m in mappings if m.executable)
    for words in stacks:
        top = words[-THREAD_TOP // 8 :]
        functions, values = top[:-1], top[1:]
        plausible = (values >= LOWEST_ADDRESS) & (values < ADDRESS_LIMIT) & (values % np.uint64(8) == 0)
        arguments.update(values[_inside(functions, code) & plausible].tolist())
        holders += values[_inside(functions, executable) & plausible].tolist()
    arguments |= _thread_state_arguments(decoder, list(dict.fromkeys(holders))[:MAX_ROOTS], code)
    candidates = sorted(arguments)
    return {
        address: values
        for address, values in zip(candidates, decoder.structures(wanted, candidates), strict=True)
        if values is not None and is_proxy_state(decoder, values)
    }


def is_proxy_state(decoder: Decoder, values: Values) -> bool:
    """Whether these can be the members of a ``ncclProxyState`` in use."""
    ranks, local, rank = values["tpnRanks"] or 0, values["tpLocalnRanks"] or 0, values["tpRank"]
    if rank is None or not 0 <= rank < ranks <= 1 << 20 or not 0 < local <= ranks or not 0 <= (values["cudaDev"] or 0) < 1024:
        return False
    if values["refCount"] is not None and not 0 < values["refCount"] <= 1 << 16:
        return False
    return all(decoder.is_readable(values[name] or 0, 4, 4) for name in ("abortFlag", "ncclNet") if values[name] is not None)


def _thread_state_arguments(decoder: Decoder, holders: Sequence[int], code: NDArray[np.uint64]) -> set[int]:
    """What ``std::thread`` states among ``holders`` pass to a function of NCCL."""
    good = [address for address in holders if decoder.is_readable(address, _THREAD_STATE)]
    found: set[int] = set()
    for part in decoder.reader.read_many([(address, _THREAD_STATE) for address in good]):
        if part is None:
            continue
        # The first word is the state's vtable.
        words = np.frombuffer(part, dtype=np.uint64)[1:]
        is_code = _inside(words, code)
        if is_code.any():
            found.update(int(word) for word in words[~is_code] if word)
    return found


def _ranges(mappings: Iterable[Mapping]) -> NDArray[np.uint64]:
    bounds = [(m.start, m.end) for m in mappings]
    return np.array(bounds, dtype=np.uint64).reshape(-1, 2)


def _inside(words: NDArray[np.uint64], ranges: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which words lie in one of the ascending ranges."""
    if not len(ranges):
        return np.zeros(len(words), dtype=np.bool_)
    index = np.searchsorted(ranges[:, 0], words, side="right").astype(np.int64) - 1
    inside: NDArray[np.bool_] = (index >= 0) & (words < ranges[np.maximum(index, 0), 1])
    return inside
