"""Whose counts differ, in words: where waits cannot be drawn from counts, a reader still wants to know who has called least."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from ncclwatch.ingest.ras_answer import RasAnswer, RasCommunicator

SHOWN, NAMED = 4, 6
"""Communicators and ranks that are told."""


def differences(answer: RasAnswer) -> Iterator[str]:
    """A line for each communicator whose ranks have called differently; first those in which the fewest are unlike the most."""
    found = [(alike, one) for one in answer.communicators if len(alike := _alike(one)) > 1]
    ranked = sorted(found, key=lambda pair: _unlike(pair[0]))
    for alike, one in ranked[:SHOWN]:
        *others, most = sorted(alike.items(), key=lambda item: len(item[1]))
        said = [f"{_ranks(ranks)} called {_counts(counts)}" for counts, ranks in others[:SHOWN]]
        yield f"communicator {one.hash:016x}: {'; '.join(said)}; {len(most[1])} other ranks {_counts(most[0])}"
    if len(ranked) > SHOWN:
        yield f"counts differ on {len(ranked) - SHOWN} more communicators"


def lag(answer: RasAnswer, comm_hash: int, behind: Collection[int]) -> int:
    """By how many calls the last of some ranks of a communicator is behind who has called most; 0 where that is not told."""
    ranks = next((one.ranks for one in answer.communicators if one.hash == comm_hash), ())
    called = {rank.rank: sum(rank.counts.values()) for rank in ranks if rank.counts is not None}
    return max(called.values(), default=0) - min((called[rank] for rank in behind if rank in called), default=0)


Counts = tuple[tuple[str, int], ...]


def _unlike(alike: dict[Counts, list[int]]) -> int:
    """How many ranks are unlike the most."""
    numbers = [len(ranks) for ranks in alike.values()]
    return sum(numbers) - max(numbers)


def _alike(one: RasCommunicator) -> dict[Counts, list[int]]:
    alike: dict[Counts, list[int]] = defaultdict(list)
    for rank in one.ranks:
        if rank.counts is not None:
            alike[tuple(sorted(rank.counts.items()))].append(rank.rank)
    return alike


def _counts(counts: Counts) -> str:
    return ", ".join(f"{name} {count} times" for name, count in counts if count) or "nothing"


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, sorted(ranks)[:NAMED])) + (" …" if len(ranks) > NAMED else "")
    return f"rank{'s' * (len(ranks) > 1)} {named}"
