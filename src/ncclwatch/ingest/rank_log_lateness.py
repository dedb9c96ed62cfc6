"""Whose calls come last, by rank logs: MegaTrace's own way to a slow rank, for stretches in which others wait more than they
did, or more than others of its kind.

"By comparing timestamped synchronization calls within the collective group, the specific rank causing the barrier wait is
pinpointed" (MegaTrace, III-C). Here: how long all others of a communicator waited for the last one's call
(:mod:`.rank_log_waits`), added up in windows, and less what is usual in the same log. Where it was so from the beginning, or for
most of the log, the other communicators of the same kind say what is usual.

It is an estimate from calls: a GPU that is slow shows only once its host waits for it. It names nobody unless one rank stands
out. Who is late among all that share their gradients is so with all that work on the same samples; the communicator that they
call most on tells which of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.ingest.rank_log_groups import Shared
from ncclwatch.ingest.rank_log_layout import Layout
from ncclwatch.ingest.rank_log_pauses import longest_pause
from ncclwatch.ingest.rank_log_waits import FASTEST, Called, Excuses, Windows, called, replicas, waited_for
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass

SHORTEST_WINDOW_S, MOST_WINDOWS = 5.0, 60
FEWEST = 20
"""Operations of a communicator in a window; chosen."""
OUTSTANDS = 1.3
"""So many times as long as for any rank outside its communicator others must wait for it; chosen: the published logs have
1.5.
"""
LEAST = 0.1
"""Part of the time that others must wait for it beyond what is usual; chosen."""
BY_KIND = 0.2
"""The same where only other communicators of its kind say what is usual: stages and tensor groups of a healthy job differ by
less; chosen.
"""
FEWEST_OF_A_KIND = 2
"""Other communicators of a kind that say what is usual; chosen."""
SLOWER = 0.9
"""Part of the usual calls of a window below which a job is taken for slow; chosen."""
USUAL = 0.25
"""The quantile of a log's windows that is taken for usual: less than three quarters of it are slow."""
PAUSE = 0.3
"""A single wait of more than that part of all waits in a window is a pause (a loader, a checkpoint) and no slow rank; chosen."""
SHOWN = 3
PAST_CONFIDENCE = 0.6
"""What stands out over two windows; chosen."""


class Late(NamedTuple):
    """For how much of a stretch others waited for a rank's calls, and for how much is usual. Times in s since the epoch."""

    rank: int
    share: float
    usual: float
    begin: float
    end: float
    ranks: tuple[int, ...]
    role: str
    slow: bool
    """Whether fewer calls were made there than usual, or others waited for it by far more than is usual."""
    busiest: bool = True
    """Whether it is the communicator on which the rank calls most."""
    by_kind: bool = False
    """Whether ``usual`` is that of other communicators of its kind."""
    fewer: bool = False
    """Whether fewer calls were made than usual: hosts that call ahead of their GPUs may call late at no cost."""

    @property
    def gained(self) -> float:
        """What is beyond the usual."""
        return self.share - self.usual

    def text(self, layout: Layout | None) -> str:
        """One line."""
        of = {"tensor": "its tensor group", "data": "its data group", "world": "the group of all ranks"}.get(
            self.role, "its group"
        )
        stage = f", pipeline stage {layout.stage(self.rank)}" if layout is not None and layout.pp > 1 else ""
        names = f"ranks {', '.join(map(str, self.ranks[:8]))}{' …' if len(self.ranks) > 8 else ''}"
        return (
            f"rank {self.rank}{stage} calls last in {of} ({names}): for {self.end - self.begin:.0f} s the others waited for it "
            f"{self.share:.0%} of the time, {'in other groups of that kind' if self.by_kind else 'usually'} {self.usual:.0%}"
        )


class Lateness:
    """Who is late in which window of a job's logs."""

    def __init__(self, shared: Sequence[Shared], begin_ns: int, end_ns: int) -> None:
        self.begin, self.end = begin_ns / 1e9, end_ns / 1e9
        self.window = max(SHORTEST_WINDOW_S, (self.end - self.begin) / MOST_WINDOWS)
        self.windows = max(1, int(np.ceil((self.end - self.begin) / self.window)))
        self._found: list[list[Late]] = [[] for _ in range(self.windows)]
        self.parts = windows = Windows(self.begin, self.window, self.windows)
        found = [one for own in shared if (one := called(own, windows, FEWEST)) is not None]
        busiest: dict[int, Called] = {}
        for one in found:
            for rank in one.ranks:
                if rank not in busiest or one.times.shape[1] > busiest[rank].times.shape[1]:
                    busiest[rank] = one
        self.replica = replicas(shared, {rank: one.shared for rank, one in busiest.items()})
        excuses = Excuses(found)
        tightest = list({id(one): one for one in busiest.values()}.values())
        self.pause = longest_pause(tightest, excuses) if len(tightest) > 1 else None
        shares = [np.stack([_share(one, place, excuses, windows) for place in range(len(one.ranks))], axis=1) for one in found]
        usual = _of_their_kind(found, shares)
        for one, own, of_kind in zip(found, shares, usual, strict=True):
            self._take(one, own, of_kind, {rank for rank in one.ranks if busiest[rank] is one})

    def _take(self, one: Called, shares: NDArray[np.float64], of_kind: NDArray[np.float64], busiest: set[int]) -> None:
        calls = np.bincount(one.window, minlength=self.windows)
        busy = calls >= FEWEST
        if np.count_nonzero(busy) < 3:
            return
        usual, slow = np.quantile(shares[busy], USUAL, axis=0), calls < SLOWER * np.quantile(calls[busy], FASTEST)
        ranks = tuple(sorted(one.ranks))
        for number in np.flatnonzero(busy).tolist():
            begin = self.begin + number * self.window
            for rank, share, normal in zip(one.ranks, shares[number].tolist(), usual.tolist(), strict=True):
                kind = share - normal < LEAST and share - of_kind[number] >= BY_KIND
                if share > normal or kind:
                    self._found[number].append(
                        Late(
                            rank, share, float(of_kind[number]) if kind else normal, begin, begin + self.window, ranks,
                            one.shared.role, bool(slow[number]) or share - normal >= BY_KIND or kind, rank in busiest, kind,
                            bool(slow[number]),
                        )
                    )  # fmt: skip

    def of_window(self, number: int) -> tuple[Late | None, list[Late]]:
        """Who stands out in a window, if anybody does; and whoever is late, most late first."""
        found = sorted(self._found[number], key=lambda late: -late.gained)
        first = next((late for late in found if late.busiest and late.gained >= LEAST), found[0] if found else None)
        if first is None:
            return None, []
        others = self.others(first, found)
        beside = max((late.gained for late in found if late.ranks == first.ranks and late.rank != first.rank), default=0.0)
        stands = first.gained >= LEAST and first.gained >= OUTSTANDS * max(others, beside)
        return (first if stands else None), found

    def others(self, first: Late, found: Sequence[Late]) -> float:
        """How late ranks are that the first does not explain: whoever works on the same samples is late with it."""
        return max(
            (
                late.gained for late in found
                if late.rank not in first.ranks and (late.busiest or self.replica[late.rank] != self.replica[first.rank])
            ), default=0.0,
        )  # fmt: skip

    def at(self, time: float) -> tuple[Late | None, list[Late]]:
        """The same of the newest window that had ended by a moment (s since the epoch)."""
        number = int((time - self.begin) / self.window) - 1
        return self.of_window(number) if 0 <= number < self.windows else (None, [])

    def stretches(self) -> Iterator[Late]:
        """Who stands out in two windows in a row or more while fewer calls were made than usual: one item a stretch."""
        said = [self.of_window(number)[0] for number in range(self.windows)]
        for rank, found in groupby(said, key=lambda late: late.rank if late is not None and late.slow else None):
            own = [late for late in found if late is not None]
            if rank is not None and len(own) > 1:
                share, usual = (float(np.mean([getattr(late, name) for late in own])) for name in ("share", "usual"))
                fewer = 2 * sum(late.fewer for late in own) >= len(own)
                yield own[0]._replace(share=share, usual=usual, end=min(own[-1].end, self.end), fewer=fewer)


def _share(one: Called, place: int, excuses: Excuses, windows: Windows) -> NDArray[np.float64]:
    """For which part of each window others waited for a rank; none where that was a single pause."""
    total, longest = waited_for(one, place, excuses, windows)
    found: NDArray[np.float64] = np.where(longest > PAUSE * total, 0.0, np.minimum(total / windows.length, 1.0))
    return found


def _of_their_kind(found: Sequence[Called], shares: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """For each communicator, by window, how long those of the others of its kind that call last are waited for, at the median;
    1 where there are too few others.
    """
    kinds: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for number, one in enumerate(found):
        kinds[one.shared.role, len(one.ranks), one.times.shape[1].bit_length()].append(number)
    most = [own.max(axis=1) for own in shares]
    usual = [np.ones(len(own)) for own in most]
    for numbers in kinds.values():
        for number in numbers if len(numbers) > FEWEST_OF_A_KIND else ():
            usual[number] = np.median([most[other] for other in numbers if other != number], axis=0)
    return usual


def name_latest(verdict: Verdict, lateness: Lateness, layout: Layout | None, sources: dict[int, str]) -> Verdict:
    """The verdict on a job that is slower than it was, of which nobody is named, with the rank whose calls come last where one
    stands out; any other as it is.
    """
    slow = verdict.verdict_class is VerdictClass.RUNNING and any("who makes the job slow" in line for line in verdict.unobserved)
    if not slow or verdict.time is None:
        return verdict
    first, found = lateness.at(verdict.time)
    lines = tuple(late.text(layout) for late in found[:SHOWN] if late.gained >= LEAST / 2)
    if first is None:
        return replace(verdict, evidence=(*verdict.evidence, *lines))
    others = lateness.others(first, found)
    stage = f"pipeline stage {layout.stage(first.rank)}" if layout is not None and layout.pp > 1 else ""
    culprit = Culprit(first.rank, first.ranks.index(first.rank), sources.get(first.rank, ""), None, None, None, None, stage=stage)
    summary = verdict.summary.replace("; who holds it up does not show", "")
    return replace(
        verdict, verdict_class=VerdictClass.SLOW_COMPUTATION, stage=stage, culprits=(culprit,),
        evidence=(*verdict.evidence, *lines),
        summary=f"{summary}; rank {first.rank} calls last (estimated from rank logs, as MegaTrace does)",
        victims=tuple(rank for rank in first.ranks if rank != first.rank),
        confidence=round(min(0.8, first.gained / (first.gained + others)), 2), rules=(*verdict.rules, "rank-log-latest"),
        unobserved=tuple(line for line in verdict.unobserved if "who makes the job slow" not in line),
    )  # fmt: skip


def name_past(verdict: Verdict, lateness: Lateness, layout: Layout | None, sources: dict[int, str]) -> Verdict:
    """The last verdict of logs in which nobody holds the job up at their end, with who slowed it down before that, if anybody
    did.
    """
    over = verdict.time is not None and verdict.time >= lateness.end
    if verdict.verdict_class.accuses or not over:
        return verdict
    last = lateness.end - lateness.window
    # Before and after a stretch that is over shows whether the job was slower in it.
    found = (late for late in lateness.stretches() if late.fewer or late.end >= last)
    worst = max(found, key=lambda late: late.gained * (late.end - late.begin), default=None)
    if worst is None:
        return verdict
    stage = f"pipeline stage {layout.stage(worst.rank)}" if layout is not None and layout.pp > 1 else ""
    culprit = Culprit(worst.rank, worst.ranks.index(worst.rank), sources.get(worst.rank, ""), None, None, stage=stage)
    until = "until the logs end" if worst.end >= last else f"for {worst.end - worst.begin:.0f} s; then the job went on as before"
    return replace(
        verdict, verdict_class=VerdictClass.SLOW_COMPUTATION, stage=stage, culprits=(culprit,), since=worst.begin,
        summary=f"rank {worst.rank} slowed the job down {until}: it called last (estimated from rank logs, as MegaTrace does)",
        victims=tuple(rank for rank in worst.ranks if rank != worst.rank), confidence=PAST_CONFIDENCE,
        evidence=(*verdict.evidence, worst.text(layout)), rules=(*verdict.rules, "rank-log-latest"),
    )  # fmt: skip
