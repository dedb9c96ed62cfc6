"""The views that a number opens, and the line of their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.style import Style
from textual import events
from textual.containers import Vertical
from textual.widget import Widget

from ncclwatch.dashboard import columns
from ncclwatch.dashboard.delays import DelayMatrix
from ncclwatch.dashboard.grid import RankGrid
from ncclwatch.dashboard.lines import DIM, Line, TextLines
from ncclwatch.dashboard.table import Column, RowTable
from ncclwatch.view.frame import View
from ncclwatch.view.ranks import rank_rows

ACTIVE_TAB = Style(bold=True, reverse=True)


Recent = Callable[[], list[View]]
"""The views of the last seconds."""


@dataclass(frozen=True, slots=True)
class Tab:
    """One of the views: its name, its widget's id, how that is made and how it takes a view."""

    name: str
    id: str
    make: Callable[[str, Recent], Widget]
    show: Callable[[Widget, View], None]
    table: bool = True


def _table(name: str, number: str, rows: Callable[[View], Sequence[Any]], shape: Sequence[Column[Any]], **options: Any) -> Tab:
    """A view that is one table of the rows that ``rows`` finds."""

    def make(number: str, _recent: Recent) -> Widget:
        return RowTable(shape, id=number, **options)

    def show(widget: Widget, view: View) -> None:
        if isinstance(widget, RowTable):
            widget.show(rows(view))

    return Tab(name, number, make, show)


def _make_ranks(number: str, _recent: Recent) -> Widget:
    table = RowTable(columns.RANKS, identity=columns.rank_identity, style=columns.rank_style, empty="no rank yet")
    return Vertical(RankGrid(max_lines=4), table, id=number)


def _make_grid(number: str, _recent: Recent) -> Widget:
    return RankGrid(id=number)


def _make_delays(number: str, recent: Recent) -> Widget:
    return DelayMatrix(recent, id=number)


def _show_ranks(widget: Widget, view: View) -> None:
    widget.query_one(RankGrid).show(view)
    widget.query_one(RowTable).show(rank_rows(view))


def _show_grid(widget: Widget, view: View) -> None:
    if isinstance(widget, RankGrid):
        widget.show(view)


def _show_delays(widget: Widget, view: View) -> None:
    if isinstance(widget, DelayMatrix):
        widget.show(view)


TABS = (
    Tab("Ranks", "ranks", _make_ranks, _show_ranks),
    Tab("Grid", "grid", _make_grid, _show_grid, table=False),
    _table(
        "Communicators",
        "communicators",
        lambda view: view.communicators,
        columns.COMMUNICATORS,
        identity=lambda row: row.key,
        style=columns.communicator_style,
        empty="no communicator was read (no samples of the past are kept where ranks are many)",
    ),
    _table(
        "Operations",
        "operations",
        lambda view: view.operations,
        columns.OPERATIONS,
        identity=lambda row: (row.name, row.sequence, row.comm_hash),
        empty="no operation is open on any rank",
    ),
    _table(
        "Flows",
        "flows",
        lambda view: view.frame.flows or (),
        columns.FLOWS,
        identity=lambda row: row.record,
        style=columns.flow_style,
        empty="no connection over a network was read: 'ncclwatch flows' reads them",
    ),
    _table(
        "NICs",
        "nics",
        lambda view: view.frame.nics or (),
        columns.NICS,
        identity=lambda row: (row.record.host, row.record.name),
        style=columns.nic_style,
        empty="no NIC was looked at",
    ),
    Tab("Delays", "delays", _make_delays, _show_delays, table=False),
    _table(
        "Log",
        "log",
        lambda view: list(reversed(view.frame.log)),
        columns.LOG,
        identity=id,
        style=columns.log_style,
        empty="nothing has happened yet",
    ),
)


SHORT = {"Communicators": "Comms", "Operations": "Ops"}


class TabLine(TextLines):
    """The names of the views; a click opens one."""

    def __init__(self) -> None:
        super().__init__(self._names, fixed=1)
        self.active = 0

    def _spans(self, cells: int) -> list[tuple[int, str]]:
        names = [f" {i + 1} {tab.name} " for i, tab in enumerate(TABS)]
        if sum(map(len, names)) > cells:
            names = [f" {i + 1} {SHORT.get(tab.name, tab.name)} " for i, tab in enumerate(TABS)]
        return list(enumerate(names))

    def _names(self, cells: int) -> list[Line]:
        return [tuple((name, ACTIVE_TAB if i == self.active else DIM) for i, name in self._spans(cells))]

    def on_click(self, event: events.Click) -> None:
        """Open the view whose name was clicked."""
        at = 0
        for i, name in self._spans(self.size.width):
            at += len(name)
            if event.x < at:
                self.app.post_message(events.Key(str(i + 1), str(i + 1)))
                return
