"""Whose calls come last, by rank logs: MegaTrace's own way to a slow rank, for stretches in which others wait more than they
did.

"By comparing timestamped synchronization calls within the collective group, the specific rank causing the barrier wait is
pinpointed" (MegaTrace, III-C). Here: how long all others of a communicator had called an operation before its last one did,
added up in windows, and less what is usual in the same log. Clocks of hosts that differ are put right by what their calls
differ by at the median.

It is an estimate from calls: who calls late may be made late by another communicator, and a GPU that is slow shows only once
its host waits for it. It names nobody unless one rank stands out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.ingest.rank_log_groups import POINT_TO_POINT, Chain, Shared
from ncclwatch.ingest.rank_log_layout import Layout
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
SLOWER = 0.9
"""Part of the usual calls of a window below which a job is taken for slow; chosen."""
FASTEST = 0.75
"""The quantile of windows by calls from which on a job is taken for healthy, to compare clocks; chosen."""
USUAL = 0.25
"""The quantile of a log's windows that is taken for usual: less than three quarters of it are slow."""
PAUSE = 0.3
"""A single wait of more than that part of all waits in a window is a pause (a loader, a checkpoint) and no slow rank; chosen."""
LONGEST_WAIT_S = 60.0
"""Bound: a longer one is no wait for a slow rank."""
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
    """Whether fewer calls were made there than usual."""

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
            f"{self.share:.0%} of the time, usually {self.usual:.0%}"
        )


class Lateness:
    """Who is late in which window of a job's logs."""

    def __init__(self, shared: Sequence[Shared], begin_ns: int, end_ns: int) -> None:
        self.begin, self.end = begin_ns / 1e9, end_ns / 1e9
        self.window = max(SHORTEST_WINDOW_S, (self.end - self.begin) / MOST_WINDOWS)
        self.windows = max(1, int(np.ceil((self.end - self.begin) / self.window)))
        self._found: list[list[Late]] = [[] for _ in range(self.windows)]
        for one in shared:
            chains = [chain for chain in one.chains.values() if not chain.exchanges and len(chain.rows) >= FEWEST]
            if len(chains) == len(one.chains) > 1:
                self._take(one, chains)

    def _take(self, one: Shared, chains: Sequence[Chain]) -> None:
        times = _lined_up(chains)
        if times.shape[1] < FEWEST:
            return
        at = np.clip(((times.max(axis=0) - self.begin) / self.window).astype(np.int64), 0, self.windows - 1)
        times = _on_one_clock(times, at)
        order = np.sort(times, axis=0)
        waits, last = np.minimum(order[-1] - order[-2], LONGEST_WAIT_S), np.argmax(times, axis=0)
        total, longest = np.zeros((2, self.windows, len(chains)))
        np.add.at(total, (at, last), waits)
        np.maximum.at(longest, (at, last), waits)
        total[longest > PAUSE * total] = 0.0
        calls = np.bincount(at, minlength=self.windows)
        shares = np.minimum(total / self.window, 1.0)
        busy = calls >= FEWEST
        if np.count_nonzero(busy) < 3:
            return
        usual, slow = np.quantile(shares[busy], USUAL, axis=0), calls < SLOWER * np.quantile(calls[busy], FASTEST)
        ranks = tuple(sorted(chain.rank for chain in chains))
        for number in np.flatnonzero(busy).tolist():
            begin = self.begin + number * self.window
            for chain, share, normal in zip(chains, shares[number].tolist(), usual.tolist(), strict=True):
                if share > normal:
                    self._found[number].append(
                        Late(chain.rank, share, normal, begin, begin + self.window, ranks, one.role, bool(slow[number]))
                    )

    def of_window(self, number: int) -> tuple[Late | None, list[Late]]:
        """Who stands out in a window, if anybody does; and whoever is late, most late first."""
        found = sorted(self._found[number], key=lambda late: -late.gained)
        if not found:
            return None, []
        first = found[0]
        others = max((late.gained for late in found if late.rank not in first.ranks), default=0.0)
        beside = max((late.gained for late in found if late.rank in first.ranks and late.rank != first.rank), default=0.0)
        stands = first.gained >= LEAST and first.gained >= OUTSTANDS * max(others, beside)
        return (first if stands else None), found

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
                yield own[0]._replace(share=share, usual=usual, end=min(own[-1].end, self.end))


def _lined_up(chains: Sequence[Chain]) -> NDArray[np.float64]:
    """When each rank called what all ranks called, s on its own clock, shape (ranks, operations)."""
    parts = []
    for chain in chains:
        own = chain.lines[~np.isin(chain.lines["function"], POINT_TO_POINT)]
        counts, first = np.unique(own["op_count"], return_index=True)
        parts.append((counts, own["time_ns"][first]))
    common = parts[0][0]
    for counts, _ in parts[1:]:
        common = np.intersect1d(common, counts, assume_unique=True)
    return np.stack([own[np.searchsorted(counts, common)] / 1e9 for counts, own in parts])


def _on_one_clock(times: NDArray[np.float64], window: NDArray[np.int64]) -> NDArray[np.float64]:
    """Times on the clock of the first rank's host: less what they differ by in the windows with most calls, where the job was
    fastest.
    """
    calls = np.bincount(window)
    fast = calls[window] >= np.quantile(calls[calls >= FEWEST], FASTEST) if (calls >= FEWEST).any() else window >= 0
    made: NDArray[np.float64] = times - np.median((times - times[:1])[:, fast], axis=1)[:, None]
    return made


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
    others = max((late.gained for late in found if late.rank not in first.ranks), default=0.0)
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
    worst = max(lateness.stretches(), key=lambda late: late.gained * (late.end - late.begin), default=None)
    if worst is None:
        return verdict
    stage = f"pipeline stage {layout.stage(worst.rank)}" if layout is not None and layout.pp > 1 else ""
    culprit = Culprit(worst.rank, worst.ranks.index(worst.rank), sources.get(worst.rank, ""), None, None, stage=stage)
    still = worst.end >= lateness.end - lateness.window
    until = "until the logs end" if still else f"for {worst.end - worst.begin:.0f} s; then the job went on as before"
    return replace(
        verdict, verdict_class=VerdictClass.SLOW_COMPUTATION, stage=stage, culprits=(culprit,), since=worst.begin,
        summary=f"rank {worst.rank} slowed the job down {until}: it called last (estimated from rank logs, as MegaTrace does)",
        victims=tuple(rank for rank in worst.ranks if rank != worst.rank), confidence=PAST_CONFIDENCE,
        evidence=(*verdict.evidence, worst.text(layout)), rules=(*verdict.rules, "rank-log-latest"),
    )  # fmt: skip
