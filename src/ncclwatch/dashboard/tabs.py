"""The views that a number opens, and the line of their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.style import Style
from textual import events
from textual.widget import Widget

from ncclwatch.dashboard import columns
from ncclwatch.dashboard.delays import DelayMatrix
from ncclwatch.dashboard.grid import RankGrid
from ncclwatch.dashboard.lines import DIM, Line, TextLines
from ncclwatch.dashboard.table import RowTable
from ncclwatch.dashboard.view import View

ACTIVE_TAB = Style(bold=True, reverse=True)


@dataclass(frozen=True, slots=True)
class Tab:
    """One of the views: its name, its widget's id, and how that takes a view."""

    name: str
    id: str
    show: Callable[[Widget, View], None]
    table: bool = True


def _table(rows: Callable[[View], Sequence[Any]]) -> Callable[[Widget, View], None]:
    def show(widget: Widget, view: View) -> None:
        assert isinstance(widget, RowTable)  # noqa: S101 - ids and widgets are made side by side below
        widget.show(rows(view))

    return show


def _show_ranks(widget: Widget, view: View) -> None:
    widget.query_one(RankGrid).show(view)
    widget.query_one(RowTable).show(columns.rank_rows(view))


def _show_grid(widget: Widget, view: View) -> None:
    if isinstance(widget, RankGrid):
        widget.show(view)


def _show_delays(widget: Widget, view: View) -> None:
    if isinstance(widget, DelayMatrix):
        widget.show(view)


TABS = (
    Tab("Ranks", "ranks", _show_ranks),
    Tab("Grid", "grid", _show_grid, table=False),
    Tab("Communicators", "communicators", _table(lambda view: view.communicators)),
    Tab("Operations", "operations", _table(lambda view: view.operations)),
    Tab("Flows", "flows", _table(lambda view: view.frame.flows or ())),
    Tab("NICs", "nics", _table(lambda view: view.frame.nics or ())),
    Tab("Delays", "delays", _show_delays, table=False),
    Tab("Log", "log", _table(lambda view: list(reversed(view.frame.log)))),
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
