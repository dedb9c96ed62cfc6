"""What a window of a rank is in words: its state, its operation, its age, its progress."""

from __future__ import annotations

from ncclwatch.collect.windows import RankWindow
from ncclwatch.text import duration

RUN_STATES = {
    "R": "running", "S": "running", "D": "disk wait", "I": "running", "T": "STOPPED", "t": "TRACED", "Z": "ENDED", "X": "ENDED",
}  # fmt: skip
"""Letters of ``/proc/PID/stat`` as a person watching a job needs them: a sleeping main thread is a running rank."""

BAR_CELLS = 10


def state(window: RankWindow) -> str:
    """Run state in a word; a rank that could not be read last says so."""
    if window.problem:
        return "no read"
    return RUN_STATES.get(window.run_state, window.run_state)


def operation_text(window: RankWindow) -> str:
    """``AllReduce #14``, ``in CommSplit``, or the last call when nothing is under way."""
    operation = window.operation
    if operation is None:
        last = window.last_call
        return f"({last.name})" if last else "-"
    if operation.blocked_call:
        return f"in {operation.name}"
    number = "" if operation.sequence is None else f" #{operation.sequence}"
    more = f" +{operation.others}" if operation.others else ""
    return f"{operation.name}{number}{more}"


def age(window: RankWindow) -> str:
    """How long the current operation has been open, or how long ago the last call was."""
    if window.operation is not None:
        return (">" if window.operation.at_least else "") + duration(window.operation.age_s)
    return duration(window.last_call.age_s) if window.last_call else ""


def bar(done: int, total: int) -> str:
    """Progress in ``BAR_CELLS`` cells; full only when all steps are done."""
    filled = min(max(done, 0), total) * BAR_CELLS // max(total, 1)
    return "█" * filled + "░" * (BAR_CELLS - filled)
