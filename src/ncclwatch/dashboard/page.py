"""Drill down: rank → communicator → operation → channels and steps → threads. A page is some facts and one table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rich.style import Style

from ncclwatch.collect.windows import RankWindow
from ncclwatch.dashboard import rows
from ncclwatch.dashboard.lines import DIM, Line
from ncclwatch.dashboard.table import Column
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Communicator, ProcessSample, ProxyOperation
from ncclwatch.text import clean, duration, rate, size
from ncclwatch.view.frame import View

PLAIN = Style()


class Page(ABC):
    """One step of the drill-down. It is asked anew with every view, so that it stays live."""

    columns: Sequence[Column[Any]]
    empty = "nothing to show"
    hint = ""
    process: ProcessKey | None = None
    """The process whose stack ``k`` shows here."""

    @abstractmethod
    def title(self, view: View) -> str:
        """A few words for the path at the top."""

    @abstractmethod
    def facts(self, view: View) -> list[Line]:
        """What is known, a line each."""

    @abstractmethod
    def rows(self, view: View) -> Sequence[Any]:
        """Rows of the table."""

    def identity(self, row: Any) -> object:
        """What keeps the cursor on a row."""
        return row

    def start(self, view: View) -> object:
        """Identity of the row the cursor begins on; ``None`` for the first."""
        return None

    def style(self, row: Any) -> Style:
        """Colour of a row."""
        return PLAIN

    def open(self, view: View, row: Any) -> Page | None:
        """The page behind a row."""
        return None


def fact(label: str, text: str, style: Style = PLAIN) -> Line:
    """``label     text`` on a line."""
    return ((f" {label:<12}", DIM), (clean(text, 400), style))


def operations_in(sample: ProcessSample, communicator: Communicator) -> tuple[ProxyOperation, ...]:
    """Unfinished operations of a communicator: by its address where that is known, else by its hash."""
    return tuple(
        operation
        for operation in sample.operations
        if (
            operation.comm_address == communicator.address if operation.comm_address else operation.comm_hash == communicator.hash
        )
    )


def rank_name(window: RankWindow) -> str:
    """``rank 2``, or the pid where no rank is known."""
    return f"pid {window.process.pid}" if window.rank is None else f"rank {window.rank}"


def operation_line(window: RankWindow) -> str:
    """The current operation in full."""
    operation = window.operation
    if operation is None:
        last = window.last_call
        return f"none open; last call {last.name} {duration(last.age_s)} ago" if last else "none open"
    parts = [rows.operation_text(window), f"open for {rows.age(window)}"]
    if operation.nbytes is not None:
        parts.append(size(operation.nbytes))
    how = "/".join(p for p in (operation.algorithm, operation.protocol) if p)
    if how:
        parts.append(how)
    if operation.steps_total:
        parts.append(f"{operation.steps_done} of {operation.steps_total} steps")
    return ", ".join(parts)


def rate_line(window: RankWindow) -> str:
    """Operations, bytes and steps a second, and for how long nothing has moved."""
    parts = []
    if window.operations_per_s is not None:
        parts.append(f"{rate(window.operations_per_s)} operations/s")
    if window.bytes_per_s is not None:
        parts.append(f"{size(window.bytes_per_s)}/s")
    if window.steps_per_s is not None:
        parts.append(f"{rate(window.steps_per_s)} steps/s")
    if window.still_s is not None:
        parts.append(f"a counter moved {duration(window.still_s)} ago")
    return ", ".join(parts) or "not known yet"


def number(value: int | None) -> str:
    """The number, or ``-``."""
    return "-" if value is None else str(value)


def steps_done(operations: Sequence[ProxyOperation]) -> tuple[int, int]:
    """(steps done, steps in all) of these operations."""
    subs = [sub for operation in operations for sub in operation.subs]
    return sum(min(max(sub.done, 0), sub.nsteps) for sub in subs), sum(sub.nsteps for sub in subs)
