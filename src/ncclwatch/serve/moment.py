"""What the page shows of a job at one moment: a view as parts, each plain JSON data, bounded, every text of a target cleaned.

Parts that do not change from one moment to the next are not sent again, so what changes together stands together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ncclwatch.collect.windows import RankWindow
from ncclwatch.knowledge.looks import doing_of
from ncclwatch.model.doing import Doing
from ncclwatch.model.looks import ProcessLook
from ncclwatch.model.verdict import Verdict
from ncclwatch.remote.iterations import Timed
from ncclwatch.remote.job_view import NodeLine
from ncclwatch.text import clean, ranges
from ncclwatch.view.frame import View, operation_title
from ncclwatch.view.ranks import RankRow, rank_rows
from ncclwatch.view.states import BY_LETTER, STATES, URGENCY
from ncclwatch.view.verdict_text import communicator_name, culprit_name, link_name, operation_name, ticket_words
from ncclwatch.view.waits import Pair, WaitMatrix, paths_to
from ncclwatch.view.why import parts

MAX_ROWS = 128
"""Ranks in the table, the most urgent first; of the others the grid shows the state, and one is told when it is opened."""
MAX_VERDICTS = 16
MAX_CULPRITS = 64
MAX_LINES = 64
MAX_PAIRS = 2048
MAX_NODES = 256
MAX_STACKS = 16
MAX_LOG = 100
MAX_OPERATIONS = 32
MAX_KEPT_ITERATIONS = 400
TROUBLE = tuple(state.letter for state in STATES if state.letter in "XDT?sw")
"""States that the timeline counts."""

_RUNS = re.compile(r"(.)\1*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Extra:
    """What is known of a job besides its view. ``waits`` are of the newest samples, ``iterations`` all that are kept."""

    waits: WaitMatrix
    iterations: Sequence[Timed] = ()
    nodes: Sequence[NodeLine] = ()
    behind_s: float = 0.0


def sections(view: View, extra: Extra) -> dict[str, Any]:
    """The parts of a moment by name."""
    frame = view.frame
    ranks = [window.rank for window in frame.windows if window.rank is not None]
    usual = usual_of(extra.iterations, view.verdict)
    return {
        "verdicts": [verdict_part(verdict) for verdict in frame.verdicts[:MAX_VERDICTS]],
        "cost": cost_of(view.verdict, extra.iterations, len(view.grid), frame.time),
        "grid": {"letters": run_lengths(view.grid.letters), "ranks": _numbers(view.grid.ranks), "count": len(view.grid)},
        "rows": [row_part(row) for row in rank_rows(view)[:MAX_ROWS]],
        "operations": [
            {
                "name": clean(row.name, 60), "sequence": row.sequence, "communicator": f"{row.comm_hash:016x}",
                "on": len(row.windows), "nranks": row.nranks, "age": round(row.age_s, 1), "done": row.least_done,
                "most": row.most_done, "total": row.steps_total,
            }
            for row in view.operations[:MAX_OPERATIONS]
        ],
        "waits": waits_part(extra.waits, view.accused.ranks, view.waits, ranks),
        "iterations": {"times": [[round(end, 3), round(took, 6)] for end, took in extra.iterations], "usual": usual},
        "stacks": [stack_part(look, view) for look in frame.stacks[:MAX_STACKS]],
        "about": about_part(view, extra),
        "log": [[round(entry.time, 3), clean(entry.kind, 20), clean(entry.text, 500)] for entry in frame.log[-MAX_LOG:]],
    }  # fmt: skip


def run_lengths(letters: str) -> str:
    """``rrrX`` as ``3rX``: of a hundred thousand ranks most are like their neighbours."""
    return "".join(f"{len(run[0])}{run[1]}" if len(run[0]) > 1 else run[1] for run in _RUNS.finditer(letters))


def _numbers(ranks: Sequence[int | None]) -> list[int | None] | None:
    """The ranks of the cells, ``None`` where cell 0 is rank 0, 1 is 1, and so on."""
    return None if isinstance(ranks, range) or all(at == rank for at, rank in enumerate(ranks)) else list(ranks)


# --- verdicts --------------------------------------------------------------------------------------------------------------


def verdict_part(verdict: Verdict) -> dict[str, Any]:
    """A verdict in words, as ``diagnose --why`` has them."""
    where = []
    if verdict.operation:
        where.append(["operation", operation_name(verdict.operation)])
    if verdict.communicator:
        where.append(["communicator", communicator_name(verdict.communicator).removeprefix("communicator ")])
    if verdict.stage:
        where.append(["stage", clean(verdict.stage, 200)])
    if verdict.link:
        where.append(["link", link_name(verdict.link).removeprefix("link ")])
    return {
        "id": verdict.id, "class": str(verdict.verdict_class), "accuses": verdict.verdict_class.accuses,
        "slow": verdict.verdict_class.slow, "summary": clean(verdict.summary, 600), "confidence": round(verdict.confidence, 3),
        "since": verdict.since, "culprits": [_culprit(verdict, at) for at in range(min(len(verdict.culprits), MAX_CULPRITS))],
        "more_culprits": max(0, len(verdict.culprits) - MAX_CULPRITS),
        "waiting": clean(ranges(verdict.victims), 400), "waiting_count": len(set(verdict.victims)), "where": where,
        "evidence": _lines(verdict.evidence), "differences": _lines(verdict.differences),
        "unobserved": _lines(verdict.unobserved), "next_steps": _lines(verdict.next_steps),
        "known": [
            {
                "row": clean(one.row, 80), "seen": clean(one.seen, 400), "cause": clean(one.cause, 500),
                "likely": round(one.confidence, 2), "defect": one.defect, "check": clean(one.check, 400),
                "fixed_in": clean(one.fixed_in, 40), "do": _lines(one.do),
            }
            for one in verdict.knowledge[:MAX_LINES]
        ],
        "why": [
            {"heading": clean(part.heading, 200), "because": clean(part.because, 400), "lines": _lines(part.lines)}
            for part in parts(verdict)[:MAX_LINES]
        ],
    }  # fmt: skip


def _culprit(verdict: Verdict, at: int) -> dict[str, Any]:
    culprit = verdict.culprits[at]
    about = [clean(text, 300) for text in (culprit.stage, culprit.reason) if text and text != verdict.stage]
    about += [link_name(culprit.link)] if culprit.link and culprit.link != verdict.link else []
    about += [f"it {_doing(one)}" for one in culprit.doing[:4]]
    about += [clean(text, 300) for text in culprit.gpu_trouble[:4]]
    if not culprit.observed:
        about.append("not read: no process of this rank was looked at")
    return {
        "rank": culprit.rank,
        "name": culprit_name(culprit),
        "host": clean(culprit.host or "", 80),
        "about": about,
        "ticket": ticket_words(culprit.ticket, culprit.host) if culprit.ticket else "",
    }


def _doing(word: str) -> str:
    try:
        return Doing(word).words
    except ValueError:
        # A later release may know more of them.
        return clean(word, 40)


def _lines(lines: Sequence[str]) -> list[str]:
    shown = [clean(line, 600) for line in lines[:MAX_LINES]]
    return shown + ([f"… and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else [])


# --- ranks -----------------------------------------------------------------------------------------------------------------


def row_part(row: RankRow) -> dict[str, Any]:
    """One rank for the table."""
    return window_part(row.window, row.letter)


def window_part(window: RankWindow, letter: str) -> dict[str, Any]:
    """What a window tells of its rank."""
    operation, last, process = window.operation, window.last_call, window.process
    return {
        "rank": window.rank, "letter": letter, "state": BY_LETTER[letter].word, "host": clean(process.host, 80),
        "pid": process.pid, "gpu": window.gpu, "name": clean(process.name, 60),
        "operation": clean(operation_title(operation), 80) if operation else "",
        "age": round(operation.age_s, 1) if operation else None, "at_least": bool(operation and operation.at_least),
        "done": operation.steps_done if operation else 0, "total": operation.steps_total if operation else 0,
        "last": clean(last.name, 60) if last else "", "last_age": round(last.age_s, 1) if last else None,
        "rate": window.operations_per_s, "bytes": window.bytes_per_s,
        "still": round(window.still_s, 1) if window.still_s is not None else None, "problem": clean(window.problem, 200),
    }  # fmt: skip


def stack_part(look: ProcessLook, view: View) -> dict[str, Any]:
    """Where a process was seen to stand: frames of its main thread, the innermost first, and what the kernel shows."""
    rank = next((w.rank for w in view.frame.windows if (w.process.host, w.process.pid) == (look.host, look.pid)), None)
    return {
        "rank": rank, "host": clean(look.host, 80), "pid": look.pid, "time": round(look.time, 3),
        "doing": [one.words for one in doing_of(look)[:4]],
        "frames": [clean(text, 200) for _, _, text in look.frames[:MAX_LINES]],
        "holder": [clean(text, 200) for text in look.holder[:MAX_LINES]], "kernel": clean(look.kernel, 200),
        "problem": clean(look.problem, 200),
    }  # fmt: skip


def waits_part(
    waits: WaitMatrix, culprits: Sequence[int] | frozenset[int], now: set[Pair], ranks: Sequence[int]
) -> dict[str, Any]:
    """Who waited for whom in the newest samples, the most first, and the waits that lead to the culprits."""
    most = sorted(waits.share.items(), key=lambda item: (-item[1], item[0]))
    way = paths_to(set(culprits), now)
    return {
        "samples": waits.samples,
        "ranks": len(ranks),
        "pairs": [[waiter, other, round(share, 3)] for (waiter, other), share in most[:MAX_PAIRS]],
        "more": max(0, len(most) - MAX_PAIRS),
        "culprits": sorted(culprits)[:MAX_CULPRITS],
        "way": [[rank, other, depth] for rank, (other, depth) in way.items()],
    }


# --- iterations and what trouble costs -------------------------------------------------------------------------------------


def usual_of(iterations: Sequence[Timed], verdict: Verdict | None) -> float | None:
    """The median duration, seconds: while the job is slow, of what ended before it was."""
    since = verdict.since if verdict is not None and verdict.verdict_class.slow else None
    healthy = sorted(duration for end, duration in iterations if since is None or end <= since)
    return round(healthy[len(healthy) // 2], 6) if healthy else None


def cost_of(verdict: Verdict | None, iterations: Sequence[Timed], ranks: int, now: float) -> dict[str, Any] | None:
    """What the worst verdict costs so far: the seconds that were lost, times all ranks, and the share of the time that is lost.

    A job that stands loses all the time since it does; a slow one what its iterations take longer than usual. ``None`` where
    nobody is accused, or nothing tells.
    """
    if verdict is None or not verdict.verdict_class.accuses or verdict.since is None:
        return None
    if not verdict.verdict_class.slow:
        seconds, share = max(0.0, now - verdict.since), 1.0
    else:
        usual = usual_of(iterations, verdict)
        slow = [duration for end, duration in iterations if end > verdict.since]
        if usual is None or not slow:
            return None
        seconds = max(0.0, sum(slow) - usual * len(slow))
        share = max(0.0, 1.0 - usual * len(slow) / sum(slow)) if sum(slow) > 0 else 0.0
    return {"seconds": round(seconds, 1), "share": round(share, 3), "rank_seconds": round(seconds * ranks, 1)}


def about_part(view: View, extra: Extra) -> dict[str, Any]:
    """What is watched, by which planes, and what watching costs."""
    frame, cost = view.frame, view.frame.cost
    return {
        "ranks": len(view.grid), "observed": len(frame.windows), "hosts": len(view.hosts), "layout": clean(frame.layout, 120),
        "versions": [clean(version, 20) for version in view.versions[:8]], "lost": frame.lost,
        "planes": [{"name": clean(p.name, 20), "running": p.running, "reason": clean(p.reason, 200)} for p in frame.planes],
        "probe_share": cost.probe_share, "own_share": cost.own_share, "rss": cost.rss_bytes, "behind": round(extra.behind_s, 1),
        "nodes": [
            {"name": clean(node.name, 80), "processes": node.processes, "silent": node.silent, "missed": node.missed}
            for node in sorted(extra.nodes, key=lambda node: (not node.silent, node.name))[:MAX_NODES]
        ],
        "more_nodes": max(0, len(extra.nodes) - MAX_NODES),
    }  # fmt: skip


def point_of(view: View) -> list[Any]:
    """A moment on the timeline: time, class and id of the worst verdict, ranks in trouble by state (``TROUBLE``), all ranks."""
    verdict, census = view.verdict, view.census
    counts = [census.get(letter, 0) for letter in TROUBLE]
    name, number = (str(verdict.verdict_class), verdict.id) if verdict is not None else ("", "")
    return [round(view.frame.time, 3), name, number, counts, len(view.grid)]


def worst_letter(view: View) -> str:
    """The most urgent state of any rank; running where there are none."""
    return min(view.census, key=URGENCY.__getitem__, default="r")
