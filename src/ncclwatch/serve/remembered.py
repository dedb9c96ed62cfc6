"""What a history says of nodes, for the page: asked in a thread, one question at a time, each answer kept for a moment."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from ncclwatch.history import questions
from ncclwatch.history.query import History
from ncclwatch.text import clean, duration, ranges

DAYS = 30
"""Bound: how far back is asked."""
KEPT_S = 15.0
"""Bound: an answer is shown so long before it is asked for again."""
MEMORY, TIMEOUT_S = 256 << 20, 15.0
"""Bound: what a question may take, bytes and seconds."""
MAX_ANSWERS, MAX_ROWS, MAX_NODE = 64, 200, 255
"""Bound: answers that are kept, rows of one, characters of a node's name."""

NODES = """
SELECT node, count(*) AS times, count(DISTINCT job) AS jobs, mode(class) AS mostly, sum(stood_s) AS stood_s, max(time) AS last
FROM (SELECT unnest(nodes) AS node, job, class, stood_s, time FROM incidents WHERE time >= $since)
GROUP BY node ORDER BY times DESC, last DESC LIMIT $most
"""

Answer = dict[str, Any]


class Remembered:
    """A history, by its folder or address. Raises what :class:`History` raises, when it is asked."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[float, Answer]] = OrderedDict()

    def nodes(self) -> Answer:
        """Nodes that were blamed, the most often first."""
        return self._asked("", _nodes)

    def node(self, name: str) -> Answer:
        """One node: when and for what it was blamed, and what its parts showed."""
        return self._asked(name[:MAX_NODE], lambda history, since: _node(history, name[:MAX_NODE], since))

    def _asked(self, key: str, question: Callable[[History, datetime], Answer]) -> Answer:
        with self._lock:
            kept = self._known.get(key)
            if kept is not None and time.monotonic() - kept[0] < KEPT_S:
                return kept[1]
            since = datetime.now(UTC) - timedelta(days=DAYS)
            with History(self._where, since_day=since.strftime("%Y-%m-%d"), memory=MEMORY, timeout_s=TIMEOUT_S) as history:
                answer = question(history, since) | {"since": since.timestamp()}
            self._known[key] = time.monotonic(), answer
            while len(self._known) > MAX_ANSWERS:
                self._known.popitem(last=False)
            return answer


def _nodes(history: History, since: datetime) -> Answer:
    found = history.ask(NODES, {"since": since, "most": MAX_ROWS}).dicts()
    return {
        "nodes": [
            {
                "node": clean(one["node"], 80), "times": one["times"], "jobs": one["jobs"],
                "mostly": clean(one["mostly"] or "", 40), "stood": one["stood_s"], "last": one["last"].timestamp(),
            }
            for one in found
        ]
    }  # fmt: skip


def _node(history: History, name: str, since: datetime) -> Answer:
    found = questions.blamed(history, name, since)
    return {
        "node": clean(name, 80),
        "reasons": [[clean(reason, 80), times] for reason, times in list(found.reasons.items())[:MAX_ROWS]],
        "others": [clean(other, 80) for other in found.others],
        "incidents": [_incident(one) for one in found.incidents[:MAX_ROWS]],
        "health": [
            {
                "part": clean(one["part"], 80), "what": clean(one["what"] or "", 200), "times": one["times"],
                "last": one["last"].timestamp(),
            }
            for one in found.health
        ],
    }  # fmt: skip


def _incident(one: questions.Record) -> Answer:
    ended = "no"
    if one["ended_by"] is not None:
        ended = f"{'recovered' if one['ended_by'] == 'recovery' else 'over'} after {duration(one['stood_s'] or 0.0)}"
    ranks: Sequence[int] = one["ranks"] or ()
    return {
        "time": one["time"].timestamp(), "job": clean(one["job"], 80), "class": clean(one["class"] or "", 40),
        "sure": one["confidence"], "nodes": [clean(name, 80) for name in (one["nodes"] or ())[:8]],
        "ranks": clean(ranges(ranks), 80), "ended": ended, "summary": clean(one["summary"] or "", 300),
    }  # fmt: skip
