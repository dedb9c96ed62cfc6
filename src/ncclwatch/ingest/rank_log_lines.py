"""Lines of MegaTrace's and VenusTrace's rank logs, parsed in columns.

Their patched NCCL writes one line a call (``log_event``, ``trace/megatrace_nccl.patch`` of github.com/sii-research/Megatrace)::

    [save_count 2] [1755590106.364857579] [Rank 0] Fun AllReduce Data 1 stream 0x55919d27b4b0 opCount 2 groupHash -5956

Older versions (``vccl_2.21.5_megatrace/src/transport/ring_log.cc`` of github.com/Infrawaves/Megatrace) have neither the number
of the save nor ``opCount``. ``Data`` is the call's count of elements, ``opCount`` that of the communicator at the call,
``groupHash`` (newer versions only) a hash of the communicator's unique id, equal on all its ranks. The time is CLOCK_REALTIME. A
thread saves the lines of a ring once no call has come for a while; ``save_count`` numbers these times.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.functions import FUNCTIONS
from ncclwatch.model.events import Function

LINE = np.dtype(
    [
        ("time_ns", "<i8"), ("rank", "<i4"), ("function", "<u2"), ("save", "<u4"), ("count", "<u8"), ("stream", "<u8"),
        ("op_count", "<i8"), ("group_hash", "<u8"),
    ]
)  # fmt: skip
"""One line. Times are ns of CLOCK_REALTIME; ``save`` and ``group_hash`` are 0 where the line has none, ``op_count`` is
``NOT_COUNTED``; ``function`` that of call events, 0 where the name is not known."""
NOT_COUNTED = -1

LONGEST_LINE = 160
"""Bound: bytes of a line (their ring keeps 128, and the number of the save is written before that)."""
HIGHEST_RANK = 1 << 20
"""Bound: ranks of a job."""
NAMES: dict[bytes, int] = {what.name.encode(): int(number) for number, what in FUNCTIONS.items() if what.operation}
NAMES |= {b"Broadcast": int(Function.BROADCAST), b"AllToAll": int(Function.ALL_TO_ALL)}
_SAVE = b"[save_count "
_LITERALS = (
    (1, b"[Rank "), (3, b"Fun "), (5, b"Data "), (7, b"stream "), (8, b"0x"), (9, b"opCount "), (11, b"groupHash "),
)  # fmt: skip
"""What the words of a line behind the number of the save are, or begin with, by their number; with the space behind them."""
_BARE, _COUNTED, _HASHED = 9, 11, 13
"""Words of such a line without ``opCount``, with it, and with the hash of the group."""
_NAMES_CHECKED = 64
"""Bound: different names of functions whose text is looked up."""
_PAD = 24
"""Bytes put around the text, so that eight bytes can be read before and after any place."""

Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]
Words = NDArray[np.uint64]
_HEXADECIMAL = np.zeros(256, np.bool_)
_HEXADECIMAL[list(b"0123456789abcdefABCDEF")] = True
_ZEROS = np.uint64(0x3030303030303030)
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True)
class Parsed:
    """Lines of a part of a file, in its order; ``bad`` lines were none, the first of them was number ``first_bad`` (from 0).
    ``unknown``: names of functions that are not known.
    """

    lines: NDArray[np.void]
    total: int = 0
    bad: int = 0
    first_bad: int = -1
    unknown: tuple[str, ...] = field(default=())


class _Text:
    """Some text, and the eight bytes from any place of it on as one number (little endian)."""

    def __init__(self, data: bytes) -> None:
        padded = bytes(_PAD) + data + b"\n"[: not data.endswith(b"\n")] + bytes(_PAD)
        self.bytes = np.frombuffer(padded, np.uint8)
        self.eights: Words = np.ndarray((len(padded) - 7,), "<u8", padded, strides=(1,))

    def has(self, at: Indices, literal: bytes) -> NDArray[np.bool_]:
        """Whether the text at each place begins with some bytes."""
        same = np.ones(len(at), np.bool_)
        for begin in range(0, len(literal), 8):
            part = literal[begin : begin + 8]
            mask = np.uint64((1 << 8 * len(part)) - 1)
            same &= (self.eights[at + begin] & mask) == np.uint64(int.from_bytes(part, "little"))
        return same

    def number(self, begin: Indices, end: Indices, most: int) -> tuple[Words, NDArray[np.bool_]]:
        """The decimal numbers between two places, and which are some: one digit at least, ``most`` (up to 19) at most."""
        width = end - begin
        fine = (width > 0) & (width <= most)
        values = np.zeros(len(begin), np.uint64)
        widest = int(width[fine].max(initial=0))
        with np.errstate(over="ignore"):
            for part in range(-(-widest // 8)):  # the last eight digits, those before them, …
                eight, good = _eight_digits(self.eights[np.maximum(end - 8 * (part + 1), 0)], np.clip(width - 8 * part, 0, 8))
                fine &= good | (width <= 8 * part)
                values += np.where(width > 8 * part, eight, np.uint64(0)) * np.uint64(10 ** (8 * part))
        return values, fine

    def hexadecimal(self, begin: Indices, end: Indices) -> tuple[Words, NDArray[np.bool_]]:
        """The same of up to sixteen hexadecimal digits. Few differ: each is worked out once, by a hash of its text."""
        width = end - begin
        fine = (width > 0) & (width <= 16)
        low, high = (
            _last_bytes(self.eights[np.maximum(end - 8 * (part + 1), 0)], np.clip(width - 8 * part, 0, 8)) for part in range(2)
        )
        with np.errstate(over="ignore"):
            _, first, kind = np.unique(low * _ODD ^ high, return_index=True, return_inverse=True)
        (last, good), (before, also) = (_eight_hexadecimal(word[first]) for word in (low, high))
        return (last + (before << np.uint64(32)))[kind], fine & (good & also)[kind]


def _last_bytes(word: Words, width: Indices) -> Words:
    """Of eight characters the last few, the others made zeros: numbers are read from their ends."""
    masks = np.array([(1 << 8 * (8 - kept)) - 1 for kept in range(9)], np.uint64)
    mask = masks[width]
    kept: Words = (word & ~mask) | (_ZEROS & mask)
    return kept


def _eight_hexadecimal(word: Words) -> tuple[Words, NDArray[np.bool_]]:
    """The numbers that eight hexadecimal digits are, and whether all of them are some."""
    good = np.ones(len(word), np.bool_)
    good &= _HEXADECIMAL[word.view(np.uint8).reshape(-1, 8)].all(axis=1)
    with np.errstate(over="ignore"):
        nibble = (word & np.uint64(0x0F0F0F0F0F0F0F0F)) + np.uint64(9) * ((word >> np.uint64(6)) & np.uint64(0x0101010101010101))
        pair = (nibble * np.uint64(16) + (nibble >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
        four = (pair * np.uint64(256) + (pair >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
        return (four * np.uint64(65536) + (four >> np.uint64(32))) & np.uint64(0xFFFFFFFF), good


def _eight_digits(word: Words, width: Indices) -> tuple[Words, NDArray[np.bool_]]:
    """The number that the last ``width`` of eight characters are, and whether all of them are digits: pairs, fours, eights of
    digits are added up at once in one 64-bit word.
    """
    digits = _last_bytes(word, width) ^ _ZEROS
    fine = ((digits + np.uint64(0x7676767676767676)) | digits) & np.uint64(0x8080808080808080) == 0
    pairs = digits * np.uint64(10) + (digits >> np.uint64(8))
    low = (pairs & np.uint64(0x000000FF000000FF)) * np.uint64(100 + (1000000 << 32))
    high = ((pairs >> np.uint64(16)) & np.uint64(0x000000FF000000FF)) * np.uint64(1 + (10000 << 32))
    return (low + high) >> np.uint64(32), fine


def parse(data: bytes) -> Parsed:
    """Parse whole lines. A line that is not of the form above is counted and left out.

    O(bytes), vectorised; it takes some twenty times the memory of the text: who reads files gives it parts of a few MB.
    """
    text = _Text(data)
    ends = np.flatnonzero(text.bytes == 10)
    starts = np.r_[_PAD, ends[:-1] + 1]
    spaces: Indices = np.flatnonzero(text.bytes == 32)
    first: Indices = np.asarray(np.searchsorted(spaces, starts), np.int64)
    words = np.searchsorted(spaces, ends) - first + 1
    filled = ends > starts
    saved = filled & text.has(starts, _SAVE) & (words > _BARE)
    words -= 2 * saved
    shaped = filled & (ends - starts <= LONGEST_LINE) & np.isin(words, (_BARE, _COUNTED, _HASHED))
    lines, good = np.zeros(len(ends), LINE), shaped.copy()
    unknown: set[str] = set()
    for number in (_BARE, _COUNTED, _HASHED):
        at = np.flatnonzero(shaped & (words == number))
        if len(at):
            before = first[at] + 2 * saved[at]
            gaps: list[Indices] = [spaces[before + word] for word in range(number - 1)]
            head: Indices = np.where(saved[at], spaces[before - 1] + 1, starts[at])
            lines[at], good[at], names = _columns(text, [head, *(gap + 1 for gap in gaps)], [*gaps, ends[at]])
            unknown |= names
    at = np.flatnonzero(good & saved)
    if len(at):
        stop = spaces[first[at] + 1] - 1
        lines["save"][at], fine = text.number(starts[at] + len(_SAVE), stop, 9)
        good[at] &= fine & (text.bytes[stop] == ord("]"))
    bad = np.flatnonzero(filled & ~good)
    kept = lines if good.all() else lines[good]
    return Parsed(kept, len(ends), len(bad), int(bad[0]) if len(bad) else -1, tuple(sorted(unknown)))


def _columns(text: _Text, begins: list[Indices], stops: list[Indices]) -> tuple[NDArray[np.void], NDArray[np.bool_], set[str]]:
    """The columns of lines of one number of words, which of them are fine, and names of functions that are not known."""
    made = np.zeros(len(begins[0]), LINE)
    good = np.ones(len(made), np.bool_)
    for word, literal in _LITERALS:
        if word < len(begins):
            good &= text.has(begins[word], literal)
    for word in (0, 2):  # what stands in brackets
        good &= text.bytes[stops[word] - 1] == ord("]")
    dot = stops[0] - 11  # a bracket, and nine digits before it
    good &= (text.bytes[dot] == ord(".")) & (text.bytes[begins[0]] == ord("["))
    seconds, fine = text.number(begins[0] + 1, dot, 10)
    nanoseconds, exact = text.number(dot + 1, stops[0] - 1, 9)
    good &= fine & exact & (seconds < 1 << 33)
    made["time_ns"] = np.where(good, seconds, 0) * np.uint64(1_000_000_000) + nanoseconds
    made["op_count"] = NOT_COUNTED
    counted = (("op_count", 10, 0, 18),) if len(begins) > _BARE else ()
    for name, word, less, most in (("rank", 2, 1, 7), ("count", 6, 0, 19), *counted):
        values, fine = text.number(begins[word], stops[word] - less, most)
        made[name], good = values, good & fine
    made["stream"], fine = text.hexadecimal(begins[8] + 2, stops[8])
    good &= fine & (made["rank"] < HIGHEST_RANK)
    if len(begins) == _HASHED:
        minus = text.bytes[begins[12]] == ord("-")
        values, fine = text.number(begins[12] + minus, stops[12], 19)
        with np.errstate(over="ignore"):
            made["group_hash"], good = np.where(minus, np.uint64(0) - values, values), good & fine
    made["function"], known = _functions(text, begins[4], stops[4])
    return made, good, {name for name, row in known.items() if good[row]}


def numbered(lines: NDArray[np.void]) -> NDArray[np.void]:
    """The lines of one rank, in order, with the calls of each stream counted from 0 where they have no ``opCount``. Calls that
    were lost at the beginning or between do not show then.
    """
    bare = np.flatnonzero(lines["op_count"] == NOT_COUNTED)
    if not len(bare):
        return lines
    _, kind = np.unique(lines["stream"][bare], return_inverse=True)
    order = np.argsort(kind, kind="stable")
    begin = np.searchsorted(kind[order], np.arange(int(kind.max()) + 1))
    made = lines.copy()
    made["op_count"][bare[order]] = np.arange(len(order)) - begin[kind[order]]
    return made


def _functions(text: _Text, begin: Indices, end: Indices) -> tuple[NDArray[np.uint16], dict[str, int]]:
    """Functions by their names; and of names that are not known an example, by its row."""
    width = np.minimum(end - begin, 16)
    masks = np.array([(1 << 8 * kept) - 1 for kept in range(9)], np.uint64)
    halves = [text.eights[begin + 8 * half] & masks[np.clip(width - 8 * half, 0, 8)] for half in range(2)]
    with np.errstate(over="ignore"):
        key = halves[0] * _ODD ^ halves[1] * np.uint64(0xBF58476D1CE4E5B9)
    _, rows, kind = np.unique(key, return_index=True, return_inverse=True)
    rows = rows[:_NAMES_CHECKED]
    names = [text.bytes[begin[row] : end[row]][:16].tobytes() for row in rows.tolist()]
    numbers = np.zeros(int(kind.max(initial=0)) + 1, np.uint16)
    numbers[: len(names)] = [NAMES.get(name, int(Function.NONE)) for name in names]
    unknown = {n.decode("ascii", "replace"): row for n, row in zip(names, rows.tolist(), strict=True) if n not in NAMES}
    return numbers[kind], unknown
