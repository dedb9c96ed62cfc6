"""Whether a node has been blamed before, as a line of a verdict's evidence: "third time in 9 days on node7".

It is held in memory: who judges never waits for a disk. The writer's thread reads it from the history, now and then again.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ncclwatch.errors import NcclwatchError
from ncclwatch.history import snapshot
from ncclwatch.history.files import day_of
from ncclwatch.history.tables import Row
from ncclwatch.model.verdict import Culprit, Verdict
from ncclwatch.text import clean

LOOK_BACK_S = 30 * 86400.0
"""Unit: s. From: chosen: a node that failed a month ago has been repaired, or tells that it was not."""
EPISODE_S = 3600.0
"""Unit: s. From: chosen: what is blamed again within an hour is the same trouble, told once more or after a restart."""
READ_EVERY_S = 600.0
"""Unit: s. From: chosen: verdicts of other writers into the same folder are known so late at most."""
MAX_NODES = 3
"""Bound: nodes of a verdict of which it is said; of more it is no property of a node."""
MAX_KEPT, MAX_OWN = 100_000, 1000
"""Bound: times at which nodes were blamed: of all in the history, and of one node by this process."""
_ORDINALS = ("", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@dataclass(frozen=True, slots=True, order=True)
class Blame:
    """A node was blamed: when (seconds since the epoch), the class of the verdict, the job."""

    time: float
    verdict_class: str
    job: str = ""


class Recurrence:
    """The times at which nodes were blamed, newest ``LOOK_BACK_S``."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._read: dict[str, list[Blame]] = {}
        self._own: dict[str, list[Blame]] = defaultdict(list)
        self._noted: dict[str, list[Blame]] = defaultdict(list)
        """What was noted since the history was read; ``_own``: and between the two readings before."""
        self._lock = threading.Lock()
        self._next = 0.0

    def refresh(self) -> Iterable[Row]:
        """Read the history again, in the writer's thread. What cannot be read now is as it was."""
        import pyarrow as pa

        with suppress(NcclwatchError, OSError, pa.ArrowException):
            found = read(self._where, time.time() - LOOK_BACK_S)
            with self._lock:
                self._read = found
                # What was noted before the last reading is in the history by now.
                self._own, self._noted = self._noted, defaultdict(list)
        return ()

    @property
    def is_due(self) -> bool:
        """Whether it is time to read it again; says so once."""
        due = time.monotonic() >= self._next
        if due:
            self._next = time.monotonic() + READ_EVERY_S
        return due

    def note(self, verdict: Verdict) -> None:
        """A verdict begins to stand."""
        blame = Blame(verdict.since or verdict.time or time.time(), str(verdict.verdict_class))
        with self._lock:
            for node in nodes(verdict.culprits):
                self._own[node] = [*self._own[node][-MAX_OWN:], blame]
                self._noted[node] = [*self._noted[node][-MAX_OWN:], blame]

    def lines(self, verdict: Verdict) -> tuple[str, ...]:
        """What is to be said of the nodes of its culprits, a line each; nothing where they are new, or many."""
        named = nodes(verdict.culprits)
        if not verdict.verdict_class.accuses or len(named) > MAX_NODES:
            return ()
        now = verdict.since or verdict.time or time.time()
        with self._lock:
            told = [(node, sorted({*self._read.get(node, ()), *self._own.get(node, ())})) for node in named]
        return tuple(line for node, blames in told if (line := said(node, episodes(blames, now), now)))


def nodes(culprits: Sequence[Culprit]) -> list[str]:
    """The nodes of culprits, as the scheduler names them."""
    named = [one.ticket.node if one.ticket is not None and one.ticket.node else one.host for one in culprits]
    return list(dict.fromkeys(node for node in named if node))


def episodes(blames: Iterable[Blame], before: float) -> list[Blame]:
    """What was blamed before a time and is over: the first of each row of blames that follow within ``EPISODE_S``."""
    found: list[Blame] = []
    last = float("-inf")
    for blame in sorted(one for one in blames if before - LOOK_BACK_S <= one.time < before):
        if blame.time - last > EPISODE_S:
            found.append(blame)
        last = blame.time
    return found[:-1] if found and before - last <= EPISODE_S else found


def said(node: str, past: Sequence[Blame], now: float) -> str:
    """A line on a node that was blamed before; empty for one that was not."""
    if not past:
        return ""
    count = len(past) + 1
    ordinal = _ORDINALS[count] if count < len(_ORDINALS) else f"{count}th"
    hours = (now - past[0].time) / 3600
    span = f"{max(1, round(hours))} hours" if hours < 48 else f"{round(hours / 24)} days"
    times = [f"{datetime.fromtimestamp(one.time, UTC):%Y-%m-%d %H:%M} {one.verdict_class}" for one in past[-3:]]
    jobs = {one.job for one in past if one.job}
    of = f" (job {clean(jobs.pop(), 60)})" if len(jobs) == 1 else f" ({len(jobs)} jobs)" if jobs else ""
    return f"{ordinal} time in {span} that {clean(node, 80)} is blamed; before: {', '.join(times)} UTC{of}"


def read(where: str, since: float) -> dict[str, list[Blame]]:
    """By node when it was blamed, out of a history."""
    taken = snapshot.take(where, ("verdicts",), day_of(int(since * 1e9)))
    wanted = ["id", "kind", "time", "since", "class", "job", "nodes"]
    known: dict[str, dict[str, Any]] = {}
    for table in (snapshot.dataset(taken, "verdicts").to_table(columns=wanted), taken.fresh["verdicts"].select(wanted)):
        for row in table.to_pylist()[-MAX_KEPT:]:
            if row["kind"] == "verdict" and row["time"] is not None:
                known[row["id"]] = row
    found: dict[str, list[Blame]] = defaultdict(list)
    for row in known.values():
        began = (row["since"] or row["time"]).replace(tzinfo=UTC).timestamp()
        # A culprit's two names, the scheduler's and its own, are both of that node.
        for node in row["nodes"] or ():
            found[node].append(Blame(began, row["class"] or "", row["job"] or ""))
    return dict(found)
