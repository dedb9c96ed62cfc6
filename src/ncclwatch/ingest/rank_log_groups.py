"""Communicators of rank logs: which lines of a rank are of one, and which ranks share it.

A line names no communicator. Newer logs have a hash of its unique id. Without it a stream is one: Megatron-LM gives each group
a stream of its own, and ``opCount`` is the communicator's, so it never falls on a stream that only one uses. Which ranks share
one follows from the division of the job, and is checked: under one ``opCount`` all ranks of a communicator call the same.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ncclwatch.ingest.rank_log_layout import Layout
from ncclwatch.model.events import Function

POINT_TO_POINT = (int(Function.SEND), int(Function.RECV))
ALIKE = 0.98
"""Part of the operations that ranks of one communicator must have called alike: of two that are lost at one place some may
not.
"""
TIGHT_S = 0.02
"""So close together, at the median, do all ranks call small collectives that each of them waits for; chosen."""
TIGHTER = 4.0
"""By so much more the ranks of two tensor groups are apart than those of one; measured on their published logs: 70 times."""
MANY_CHAINS = 256
"""Bound: streams of a rank that are looked at, those with most lines."""
COMPARED = 4096
"""Bound: newest operations that are compared."""


@dataclass
class Chain:
    """The lines of one communicator of one rank, in order. ``rows`` are their places among the rank's lines."""

    rank: int
    stream: int
    group_hash: int
    rows: NDArray[np.int64]
    lines: NDArray[np.void]

    @cached_property
    def exchanges(self) -> bool:
        """Whether it carries sends and receives, mostly."""
        return bool(np.isin(self.lines["function"], POINT_TO_POINT).mean() > 0.5)

    @property
    def alone(self) -> bool:
        """Whether it is a communicator of one rank: NCCL counts no operations there (``opCount`` stays 0)."""
        lines = self.lines
        return len(lines) > 2 and not lines["op_count"].any() and int(lines["time_ns"][-1] - lines["time_ns"][0]) > 1_000_000_000

    @property
    def whole(self) -> bool:
        """Whether nothing is missing from its first operation on."""
        counts = self.lines["op_count"]
        return bool(counts[0] == 0 and (np.diff(counts) <= 1).all())

    @cached_property
    def signature(self) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]]:
        """The newest collectives: ``opCount`` (each once), what was called, and when (ns)."""
        own = self.lines[~np.isin(self.lines["function"], POINT_TO_POINT)][-COMPARED:]
        counts, first = np.unique(own["op_count"], return_index=True)
        with np.errstate(over="ignore"):
            what = own["count"] * np.uint64(0x9E3779B97F4A7C15) + own["function"].astype(np.uint64)
        return counts.astype(np.int64), what[first], own["time_ns"][first]


@dataclass(slots=True)
class Shared:
    """One communicator: its chains by rank in it. ``ranks``: the job's rank of each; ``role`` is how it was found."""

    hash: int
    ranks: tuple[int, ...]
    chains: dict[int, Chain]
    role: str = ""


@dataclass(slots=True)
class Found:
    """The communicators of a job; ``left_out``: how many chains of lines could not be told whose they are; ``layout`` as given,
    or as it was found.
    """

    shared: list[Shared] = field(default_factory=list)
    left_out: int = 0
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class LoggedRanks:
    """The communicators of ranks by their logs, and these logs."""

    chains: Mapping[int, Sequence[Chain]]
    paths: Mapping[int, Path] = field(default_factory=dict)
    written_ns: Mapping[int, int] = field(default_factory=dict)


def chains_of(rank: int, lines: NDArray[np.void]) -> list[Chain]:
    """The communicators that a rank's lines are of; those of one rank are left out."""
    with np.errstate(over="ignore"):
        key = np.where(lines["group_hash"] != 0, lines["group_hash"], lines["stream"] * np.uint64(2) + np.uint64(1))
    _, inverse, sizes = np.unique(key, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    ends = np.cumsum(sizes)
    found = []
    for kind in np.argsort(-sizes)[:MANY_CHAINS].tolist():
        rows = order[ends[kind] - sizes[kind] : ends[kind]]
        for part in _one_count_each(rows, lines["op_count"][rows]):
            own = lines[part]
            chain = Chain(rank, int(own["stream"][0]), int(own["group_hash"][0]), part, own)
            if not chain.alone:
                found.append(chain)
    return found


def _one_count_each(rows: NDArray[np.int64], counts: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Rows of one stream, divided so that no count falls: by the count that each line goes on from."""
    if len(counts) < 2 or (np.diff(counts) >= 0).all():
        yield rows
        return
    last: list[int] = []
    numbers = np.zeros(len(counts), np.int64)
    for at, count in enumerate(counts.tolist()):
        fits = [number for number, newest in enumerate(last) if 0 <= count - newest <= 1]
        below = fits or [number for number, newest in enumerate(last) if count > newest]
        number = max(below, key=lambda one: last[one]) if below else len(last)
        if number == len(last):
            if number >= MANY_CHAINS:
                continue
            last.append(count)
        last[number], numbers[at] = count, number
    for number in range(len(last)):
        yield rows[numbers == number]


def join(chains: dict[int, list[Chain]], layout: Layout | None) -> Found:
    """Which chains of lines (by rank) are one communicator: by the hash of the group where lines have it, else by the
    division.
    """
    found = Found(layout=layout)
    rest: dict[int, list[Chain]] = {rank: [c for c in own if not c.group_hash] for rank, own in chains.items()}
    by_hash: dict[int, dict[int, Chain]] = defaultdict(dict)
    for own in chains.values():
        for chain in own:
            if chain.group_hash:
                by_hash[chain.group_hash].setdefault(chain.rank, chain)
    for number, held in by_hash.items():
        ranks = tuple(sorted(held))
        found.shared.append(Shared(number, ranks, {at: held[rank] for at, rank in enumerate(ranks)}, "hash"))
    if any(rest.values()):
        if found.layout is None:
            found.layout = guess(rest)
        _by_layout(rest, found)
    found.left_out = sum(map(len, rest.values()))
    return found


def _by_layout(rest: dict[int, list[Chain]], found: Found) -> None:
    """Take chains out of ``rest`` that are one communicator by the division of the job, and by what was called."""
    layout = found.layout
    if layout is None:
        _take(rest, found, [sorted(rest)], "world", _tight)
        return
    if layout.pp > 1:
        _take(rest, found, layout.groups("p").tolist(), "pipeline", _exchanging)
    if layout.tp > 1:
        _take(rest, found, layout.groups("t").tolist(), "tensor", _busiest)
    if layout.dp > 1:
        _take(rest, found, layout.groups("d").tolist(), "data", _largest)
    for over in ("tpd", "pt", "td", "dp", "p", "d", "t", "e"):
        groups = layout.groups(over)
        for _ in range(4 if groups.shape[1] > 1 else 0):
            before = len(found.shared)
            _take(rest, found, groups.tolist(), "world" if over == "tpd" else f"other-{over}", _tight)
            if len(found.shared) == before:
                break


_MAIN = ("pipeline", "tensor", "data")
Chooser = Callable[[dict[int, list[Chain]], Sequence[int]], dict[int, Chain] | None]


def _take(rest: dict[int, list[Chain]], found: Found, groups: Iterable[Sequence[int]], role: str, choose: Chooser) -> None:
    """Of each group the chains that its ranks share, by one way to choose; nothing where they do not fit together."""
    for number, ranks in enumerate(groups):
        seen = [rank for rank in ranks if rest.get(rank)]
        # Of ranks without a log nothing is compared, but they may be waited for.
        if len(seen) < (1 if len(seen) < len(ranks) and role in _MAIN else 2):
            continue
        # A rank that has a log, and calls nothing that is left, is in no further group.
        if role not in _MAIN and len(seen) < sum(rank in rest for rank in ranks):
            continue
        chosen = choose(rest, seen)
        if chosen is None:
            continue
        for rank, chain in chosen.items():
            rest[rank] = [one for one in rest[rank] if one is not chain]
        places = {rank: at for at, rank in enumerate(ranks)}
        own = {places[rank]: chain for rank, chain in chosen.items()}
        repeat = sum(shared.role == role and set(shared.ranks) == set(ranks) for shared in found.shared)
        found.shared.append(Shared(_number(role, number, repeat), tuple(ranks), own, role))


def _number(role: str, number: int, repeat: int) -> int:
    """A number for a communicator that has none, for this job only."""
    digest = hashlib.blake2b(f"{role}/{number}/{repeat}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1


def _exchanging(rest: dict[int, list[Chain]], ranks: Sequence[int]) -> dict[int, Chain] | None:
    """Sends and receives: a rank has one such communicator."""
    chosen = {}
    for rank in ranks:
        own = [chain for chain in rest[rank] if chain.exchanges]
        if len(own) == 1:
            chosen[rank] = own[0]
    return chosen if len(chosen) == len(ranks) else None


def _busiest(rest: dict[int, list[Chain]], ranks: Sequence[int]) -> dict[int, Chain] | None:
    """What is called most often: every layer's collectives."""
    chosen = {rank: max(own, key=lambda chain: len(chain.rows)) for rank in ranks if (own := _collective(rest[rank]))}
    return chosen if len(chosen) == len(ranks) and fit(list(chosen.values()), tight=False) else None


def _largest(rest: dict[int, list[Chain]], ranks: Sequence[int]) -> dict[int, Chain] | None:
    """What moves most elements: gradients and parameters."""
    chosen = {
        rank: max(own, key=lambda chain: int(chain.lines["count"].max())) for rank in ranks if (own := _collective(rest[rank]))
    }
    return chosen if len(chosen) == len(ranks) and fit(list(chosen.values()), tight=False) else None


def _collective(chains: Sequence[Chain]) -> list[Chain]:
    return [chain for chain in chains if not chain.exchanges]


def _tight(rest: dict[int, list[Chain]], ranks: Sequence[int]) -> dict[int, Chain] | None:
    """Anything that all ranks call alike, at the same time."""
    for first in _collective(rest[ranks[0]]):
        chosen = {ranks[0]: first}
        for rank in ranks[1:]:
            match = next((chain for chain in _collective(rest[rank]) if fit([first, chain], tight=True)), None)
            if match is None:
                break
            chosen[rank] = match
        if len(chosen) == len(ranks):
            return chosen
    return None


def fit(chains: Sequence[Chain], *, tight: bool) -> bool:
    """Whether chains have called alike under equal counts, each like the first; with ``tight`` also at about the same times."""
    counts, what, times = chains[0].signature
    for other in chains[1:]:
        own_counts, own_what, own_times = other.signature
        _, at, own_at = np.intersect1d(counts, own_counts, assume_unique=True, return_indices=True)
        if not len(at) or (what[at] == own_what[own_at]).mean() < ALIKE:
            return False
        if tight and np.median(np.abs(times[at] - own_times[own_at])) > TIGHT_S * 1e9:
            return False
    return True


def guess(chains: dict[int, list[Chain]]) -> Layout | None:
    """The division of a job by its lines alone; ``None`` where they do not tell it.

    Ranks whose first message is a send are the first stage's. The ranks of a tensor group call together, those of two do not.
    """
    world = len(chains)
    if sorted(chains) != list(range(world)) or world < 2:
        return None
    exchanging = {rank: own[0] for rank, chain in chains.items() if (own := [one for one in chain if one.exchanges])}
    pp = 1
    if exchanging:
        first = [rank for rank, chain in exchanging.items() if int(chain.lines["function"][0]) == Function.SEND]
        known = len(exchanging) == world and all(int(chain.lines["op_count"][0]) == 0 for chain in exchanging.values())
        if not known or not first or first != list(range(len(first))) or world % len(first):
            return None
        pp = world // len(first)
    busiest = {rank: max(own, key=lambda one: len(one.rows)) for rank, chain in chains.items() if (own := _collective(chain))}
    if len(busiest) < world:
        return None
    spread = {1: 0.0}
    for tp in (size for size in range(2, world // pp + 1) if world // pp % size == 0):
        found = [_spread([busiest[rank] for rank in range(at, at + tp)]) for at in range(0, world, tp)]
        if not all(np.isfinite(found)):
            break
        spread[tp] = float(np.median(found))
    least = min((seconds for tp, seconds in spread.items() if tp > 1), default=0.0)
    tp = max(tp for tp, seconds in spread.items() if tp == 1 or seconds <= max(TIGHTER * least, 1e-6))
    return Layout(tp, pp, world // pp // tp, "the logs themselves")


def _spread(chains: Sequence[Chain]) -> float:
    """How far apart ranks call, at the median (s); infinite where they do not call alike."""
    if not fit(chains, tight=False):
        return float("inf")
    parts = [chain.signature for chain in chains]
    common = parts[0][0]
    for counts, _, _ in parts[1:]:
        common = np.intersect1d(common, counts, assume_unique=True)
    times = np.stack([times[np.searchsorted(counts, common)] for counts, _, times in parts])
    return float(np.median(np.ptp(times, axis=0))) / 1e9
