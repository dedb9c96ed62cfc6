"""What the dump of one rank says, in columns: one row an entry, by process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.ingest.base import IngestError
from ncclwatch.ingest.flight_recorder_file import Dump
from ncclwatch.ingest.flight_recorder_names import Title, datatype, elements, title_of
from ncclwatch.model.rows import distinct
from ncclwatch.text import clean

MOST_GROUPS, MOST_RANKS = 4096, 1 << 20
"""Bound: process groups of a rank, and ranks of a group."""
LEAST_KEPT, KEPT_OF_A_GROUP, MOST_BACKENDS = 256, 64, 16
"""Bound: entries of a rank that are looked at, and more where it is in many groups: the newest of each. The engine compares 64
collectives of a group (``COMPARED``, engine/alignment.py), and looks for a broken pattern in the newest 256 calls.
"""
NS = 1 << 62
"""Bound: a time, in nanoseconds since the epoch."""


class State(IntEnum):
    """How far an entry has come. PyTorch asks the GPU's events when it dumps."""

    SCHEDULED = 0
    STARTED = 1
    COMPLETED = 2


_NUMBER_OF_GROUP = itemgetter("pg_id")
_MOMENTS = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")
_STATES = {"scheduled": State.SCHEDULED, "started": State.STARTED, "completed": State.COMPLETED}

ENTRY_DTYPE = np.dtype(
    {
        "names": [
            "group",
            "sequence",
            "function",
            "datatype",
            "state",
            "count",
            "peer",
            "created_ns",
            "message",
            "coalesced",
            "backend",
            "open",
        ],
        "formats": ["<u2", "<i8", "u1", "i1", "u1", "<i8", "<i4", "<i8", "?", "?", "u1", "?"],
    }
)
"""One entry. ``group``: index in the rank's list; ``sequence``: ``collective_seq_id``, of a message ``p2p_seq_id``; ``open``:
whether the rank may wait in it, which the dumps of all ranks tell (:class:`.flight_recorder_job.FlightJob`).
"""


class GroupName(NamedTuple):
    """A process group by its name and description, as entries have them."""

    name: str
    about: str


@dataclass(slots=True)
class RankDump:
    """One rank. ``groups``: those that its entries name; ``members``: ranks of each, by name, where the dump says so.

    ``whole``: nothing was dropped from the ring of entries. ``enqueued``: operations of a group (by name) that were called in
    all, as ``pg_status`` counts them. ``newest_ns``: the last moment that an entry speaks of. ``begun_known``: of all that is
    completed it is known when it was found begun.
    """

    rank: int
    path: Path
    entries: NDArray[Any]
    groups: list[GroupName]
    members: dict[str, tuple[int, ...]]
    whole: bool
    newest_ns: int
    expires_ns: int
    """When the newest of the waits that may be open would be given up: its entry's time and timeout."""
    begun_known: bool
    written_ns: int
    enqueued: dict[str, int] = field(default_factory=dict)
    cut: frozenset[GroupName] = frozenset()
    """Groups of which older entries were left out."""
    backends: list[str] = field(default_factory=list)
    version: str = ""
    library: str = ""
    partial: bool = False
    """Whether it was made of another record, which need not know all groups of the rank and knows no state."""


def read_rank(dump: Dump, rank: int, least: int = LEAST_KEPT) -> RankDump:
    """The newest entries of a dump in columns, ``least`` at least where there are as many. Raises :class:`IngestError`."""
    members, at = _members(dump), 0
    reader = _Reader({name: len(ranks) for name, ranks in members.items()})
    try:
        kept, cut = _newest(dump.entries, least)
        found = []
        for at in range(len(kept)):
            found.append(reader.values(kept[at]))
        rows = reader.rows(found)
        newest, expires, begun_known = _times(kept)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError, AttributeError) as error:
        where = f"entry {at} of the newest of each group"
        raise IngestError(f"{clean(str(dump.path), 160)}: {where} is no entry of a dump: {clean(str(error), 80)}") from error
    _close_coalesced(rows)
    if _over_all_groups(rows):
        _number_by_group(dump, rows, reader)
    whole = not dump.entries or dump.entries[0].get("record_id") == 0
    found_rank = RankDump(
        rank, dump.path, rows, _known(dump, rank, reader, members), members, whole, newest, expires, begun_known, dump.written_ns,
        cut=frozenset(cut), backends=list(reader.backends), version=dump.version,
        library=dump.library,
    )  # fmt: skip
    if reader.backends.keys() <= {"nccl", "xccl"}:
        found_rank.enqueued = _enqueued(dump, reader.ids)
    return found_rank


def _over_all_groups(rows: NDArray[Any]) -> bool:
    """Whether numbers run over all groups of a rank together, as those of torchcomms do (``FlightRecorder::record``,
    comms/torchcomms/hooks/fr/FlightRecorder.cpp). Numbers by group cannot grow from each call to the next where a group is called
    again after another: its own next number is one more, and leaves no room between.
    """
    newest = rows[-KEPT_OF_A_GROUP:]
    called = ~newest["message"]
    sequence, group = newest["sequence"][called], newest["group"][called]
    if not (sequence[1:] > sequence[:-1]).all():
        return False
    turns = int(np.count_nonzero(group[1:] != group[:-1]))
    return turns >= max(2, len(distinct(group)))


def _number_by_group(dump: Dump, rows: NDArray[Any], reader: _Reader) -> None:
    """Number the calls of each group by themselves, from 1. Raises :class:`IngestError` where older ones are overwritten: nobody
    knows then how many of them were of which group.
    """
    if dump.entries[0].get("record_id") != 0:
        where = clean(str(dump.path), 160)
        raise IngestError(f"{where}: its numbers run over all groups (torchcomms), and its oldest entries are overwritten")
    called = Counter(map(_group_of, dump.entries))
    for group, number in reader.groups.items():
        own = np.flatnonzero((rows["group"] == number) & ~rows["message"])
        rows["sequence"][own] = np.arange(called[group] - len(own) + 1, called[group] + 1)


def _newest(entries: Sequence[Mapping[str, Any]], least: int) -> tuple[list[Mapping[str, Any]], set[GroupName]]:
    """The newest entries of each group, in their order, and the groups of which there are more."""
    if len(entries) <= max(least, KEPT_OF_A_GROUP):
        return list(entries), set()
    groups = _groups_of(entries)
    numbers = Counter(groups)
    each = max(least // len(numbers), KEPT_OF_A_GROUP)
    missing = {group: min(number, each) for group, number in numbers.items()}
    left, kept = sum(missing.values()), []
    for at in range(len(entries) - 1, -1, -1):
        if missing[groups[at]]:
            missing[groups[at]] -= 1
            kept.append(entries[at])
            left -= 1
            if not left:
                break
    kept.reverse()
    cut = (group for group, number in numbers.items() if number > each)
    return kept, {_group_of(entries[groups.index(group)]) for group in cut}


def _groups_of(entries: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What tells the group of each entry: PyTorch's own number of it where all have one, which is quickest, else its name."""
    try:
        found: list[Any] = list(map(_NUMBER_OF_GROUP, entries))
    except KeyError:
        found = []
    return found if set(map(type, found)) == {int} else [_group_of(entry) for entry in entries]


def _known(dump: Dump, rank: int, reader: _Reader, members: Mapping[str, tuple[int, ...]]) -> list[GroupName]:
    """The groups that entries name, and those that a rank has joined and called nothing on."""
    named = {group.name for group in reader.groups}
    joined = (name for name, ranks in members.items() if name and rank in ranks and name not in named)
    return [*reader.groups, *(GroupName(name, _about(dump, name)) for name in joined)]


class _Kind(NamedTuple):
    """What all entries of one name on one group have alike. ``number``: which of the kinds; ``group``: index in the rank's list;
    ``nranks``: ranks of the group, 0 where that is not known.
    """

    number: int
    title: Title
    group: int
    nranks: int
    backend: int


class _Reader:
    """Makes rows of entries, and remembers what names mean."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.groups: dict[GroupName, int] = {}
        self.backends: dict[str, int] = {}
        self.ids: dict[int, GroupName] = {}
        self._titles: dict[str, Title] = {}
        self._sizes = sizes
        self._kinds: dict[tuple[str, int], _Kind] = {}
        """By ``profiling_name`` and number of the group."""
        self._written: dict[tuple[str, tuple[str, str]], _Kind] = {}
        """By ``profiling_name`` and ``process_group`` as entries have them: most are like one before."""

    def _title(self, name: str) -> Title:
        title = self._titles[name] = title_of(name)
        if len(self.backends) < MOST_BACKENDS:
            self.backends.setdefault(title.backend, len(self.backends))
        return title

    def _kind(self, entry: Mapping[str, Any]) -> _Kind:
        """What a name says on a group. Raises what a wrong type raises."""
        name = entry["profiling_name"]
        if type(name) is not str:
            raise TypeError("an operation without a name")
        title = self._titles.get(name) or self._title(name)
        group = _group_of(entry)
        number = self.groups.get(group)
        if number is None:
            number = self.groups[group] = len(self.groups)
            self.ids[_number(entry.get("pg_id", -1))] = group
            if number >= MOST_GROUPS:
                raise ValueError("too many process groups")
        kind = self._kinds.get((name, number))
        if kind is None:
            backend = self.backends.get(title.backend, 0)
            kind = _Kind(len(self._kinds), title, number, self._sizes.get(group.name, 0), backend)
            self._kinds[name, number] = kind
        return kind

    def values(self, entry: Mapping[str, Any]) -> tuple[Any, ...]:
        """What an entry says of itself: its kind, and what :meth:`rows` names. Raises what a wrong type raises."""
        name, named = entry["profiling_name"], entry.get("process_group")
        # Of what is hostile no hash is taken: that of tuples in tuples takes for ever.
        if type(named) is tuple and len(named) == 2 and type(name) is type(named[0]) is type(named[1]) is str:
            kind = self._written.get((name, named))
            if kind is None:
                kind = self._written[name, named] = self._kind(entry)
        else:
            kind = self._kind(entry)
        title = kind.title
        message = title.message or (title.coalesced and bool(entry.get("is_p2p")))
        if message and "p2p_seq_id" in entry:
            sequence = entry["p2p_seq_id"]
        else:
            sequence = entry["collective_seq_id"] if "collective_seq_id" in entry else entry.get("seq_id")
        return (
            kind.number, sequence, datatype(entry, title.sizes), _STATES[entry.get("state", "scheduled")],
            elements(entry, title.sizes, kind.nranks), entry.get("time_created_ns") or 0, message,
        )  # fmt: skip

    def rows(self, found: Sequence[tuple[Any, ...]]) -> NDArray[Any]:
        """Rows of ``ENTRY_DTYPE``, a column at a time: numpy takes in rows of several types one value after the other."""
        if not found:
            return np.zeros(0, ENTRY_DTYPE)
        kinds = np.zeros(len(self._kinds), ENTRY_DTYPE)
        told = [
            (kind.group, kind.title.function, kind.title.peer, kind.title.coalesced, kind.backend)
            for kind in self._kinds.values()
        ]
        for name, column in zip(("group", "function", "peer", "coalesced", "backend"), zip(*told, strict=True), strict=True):
            kinds[name] = column
        numbers, *columns = zip(*found, strict=True)
        rows = kinds.take(numbers)
        for name, column in zip(("sequence", "datatype", "state", "count", "created_ns", "message"), columns, strict=True):
            rows[name] = column
        return rows


def _group_of(entry: Mapping[str, Any]) -> GroupName:
    """(name, description): a pair from 2.1 on, before that a name, and at the very first only a number."""
    named = entry.get("process_group", entry.get("pg_name"))
    if type(named) in (tuple, list):
        name, about = named
        if type(name) is str and type(about) is str and len(name) < 4096 > len(about):
            return GroupName(name, about)
        raise TypeError("a process group without a name")
    if type(named) is str:
        return GroupName(named[:4096], "")
    return GroupName(str(_number(entry.get("pg_id", 0))), "")


def _number(value: Any) -> int:
    """A number of a group, which who writes dumps anew as JSON may have made text."""
    return _whole(int(value) if type(value) is str and value.isdecimal() and len(value) < 12 else value)


def _whole(value: Any) -> int:
    if type(value) is not int or not -1 <= value < NS:
        raise TypeError("no number where one belongs")
    return value


def _times(entries: Sequence[Mapping[str, Any]]) -> tuple[int, int, bool]:
    """The last moment that entries speak of; when the last open wait would be given up; whether beginnings are known."""
    created, started, ended = ([entry.get(name) or 0 for entry in entries] for name in _MOMENTS)
    newest = max(0, max(created, default=0), max(started, default=0), max(ended, default=0))
    begun_known = all(begun for begun, over in zip(started, ended, strict=True) if over)
    at = next((at for at in range(len(entries) - 1, -1, -1) if not ended[at]), None)
    expires = 0 if at is None else created[at] + (entries[at].get("timeout_ms") or 0) * 1_000_000
    return _whole(newest), min(_whole(min(expires, NS - 1)), NS - 1), begun_known


def _close_coalesced(rows: NDArray[Any]) -> None:
    """Give what was called inside a coalesced group the state of the group: PyTorch keeps events for that alone."""
    for closing in np.flatnonzero(rows["coalesced"]).tolist():
        one = rows[closing]
        same = (rows["group"] == one["group"]) & (rows["message"] == one["message"]) & (rows["sequence"] == one["sequence"])
        rows["state"][same] = one["state"]


def _members(dump: Dump) -> dict[str, tuple[int, ...]]:
    """Ranks of each process group, in their order, by the group's name."""
    found: dict[str, tuple[int, ...]] = {}
    for name, row in list(dump.config.items())[:MOST_GROUPS]:
        written = row.get("ranks")
        numbers = _numbers(written) if isinstance(written, str) and len(written) < 16 * MOST_RANKS else _checked(written)
        if numbers:
            found[name] = numbers
    return found


@lru_cache(maxsize=MOST_GROUPS)
def _numbers(text: str) -> tuple[int, ...]:
    """``[0, 1, 2]``: the same text in the dumps of all ranks of a group, which then share one tuple."""
    parts = (part.strip() for part in text.strip("[] ").split(","))
    return _checked([int(part) for part in parts if part.isdecimal() and len(part) < 12])


def _checked(numbers: Any) -> tuple[int, ...]:
    """Different numbers of ranks; nothing where they are none."""
    if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < MOST_RANKS for n in numbers):
        return ()
    return tuple(numbers) if len(set(numbers)) == len(numbers) else ()


def _about(dump: Dump, name: str) -> str:
    about = dump.config[name].get("desc")
    return about[:4096] if isinstance(about, str) else ""


def _enqueued(dump: Dump, ids: Mapping[int, GroupName]) -> dict[str, int]:
    """Operations called of each group, by name; where PyTorch counts messages with them the caller leaves them alone."""
    found = {}
    for number, group in ids.items():
        count = dump.status.get(str(number), {}).get("last_enqueued_collective")
        count = int(count) if isinstance(count, str) and count.removeprefix("-").isdecimal() and len(count) < 20 else count
        if type(count) is int and 0 <= count < NS:
            found[group.name] = count
    return found
