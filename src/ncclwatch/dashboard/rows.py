"""Windows of ranks as rows of text: which columns fit, what each cell says, and which ranks are shown when not all can be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ncclwatch.collect.windows import RankWindow
from ncclwatch.text import clean, duration, fit, rate, size

RUN_STATES = {
    "R": "running", "S": "running", "D": "disk wait", "I": "running", "T": "STOPPED", "t": "TRACED", "Z": "ENDED", "X": "ENDED",
}  # fmt: skip
"""Letters of ``/proc/PID/stat`` as a person watching a job needs them: a sleeping main thread is a running rank."""

HALTED = frozenset("TtZX")

BAR_CELLS = 10


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its least terminal width at which it is shown, its own width, and whether it is aligned to the right."""

    title: str
    width: int
    right: bool = False
    from_width: int = 0


COLUMNS = (
    Column("RANK", 4, right=True),
    Column("PID", 7, right=True),
    Column("GPU", 3, right=True),
    Column("STATE", 8),
    Column("OPERATION", 17),
    Column("COMM", 8, from_width=100),
    Column("SIZE", 8, right=True, from_width=112),
    Column("AGE", 6, right=True),
    Column("OPS/S", 6, right=True),
    Column("DATA/S", 8, right=True),
    Column("STEPS", 11, right=True),
    Column("", BAR_CELLS, from_width=104),
    Column("PROTO", 12, from_width=126),
)


def visible(width: int) -> list[Column]:
    """The columns that fit a terminal of that width."""
    return [column for column in COLUMNS if width >= column.from_width]


def choose(windows: Sequence[RankWindow], room: int, culprits: Collection[int]) -> list[RankWindow]:
    """At most ``room`` windows in their order: culprits first, then halted ranks, then those that stand still longest.

    ``culprits`` are pids.
    """
    if len(windows) <= room:
        return list(windows)
    urgent = sorted(
        windows,
        key=lambda w: (w.process.pid not in culprits, w.run_state not in HALTED, -(w.still_s or 0.0)),
    )
    kept = {id(window) for window in urgent[: max(room, 0)]}
    return [window for window in windows if id(window) in kept]


def cells(window: RankWindow, columns: Sequence[Column], *, waiting: bool = False) -> list[str]:
    """The text of each column, cut to its width. ``waiting`` says that a verdict counts the rank among those held up."""
    operation = window.operation
    texts = {
        "RANK": "?" if window.rank is None else str(window.rank),
        "PID": str(window.process.pid),
        "GPU": "-" if window.gpu is None else str(window.gpu),
        "STATE": "waiting" if waiting and window.run_state not in HALTED and not window.problem else state(window),
        "OPERATION": operation_text(window),
        "COMM": f"{operation.comm_hash:016x}"[:8] if operation and operation.comm_hash else "",
        "SIZE": size(operation.nbytes) if operation and operation.nbytes is not None else "",
        "AGE": age(window),
        "OPS/S": "-" if window.operations_per_s is None else rate(window.operations_per_s),
        "DATA/S": "-" if window.bytes_per_s is None else size(window.bytes_per_s),
        "STEPS": f"{operation.steps_done}/{operation.steps_total}" if operation and operation.steps_total else "",
        "": bar(operation.steps_done, operation.steps_total) if operation and operation.steps_total else "",
        "PROTO": "/".join(p for p in (operation.algorithm, operation.protocol) if p) if operation else "",
    }
    return [fit(clean(texts[column.title], 64), column.width) for column in columns]


def state(window: RankWindow) -> str:
    """Run state in a word; a rank whose newest look failed says so."""
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
