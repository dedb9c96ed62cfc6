"""The screen of one page of the drill-down: where we are, the facts, the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from ncclwatch.dashboard.lines import BOLD, DIM, Line, TextLines, plain
from ncclwatch.dashboard.page import Page
from ncclwatch.dashboard.table import RowTable
from ncclwatch.text import fit
from ncclwatch.view.frame import View


class DetailScreen(Screen[None]):
    """Shows a page, and newer views of it as they come."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,backspace,left", "app.pop_screen", show=False)]

    def __init__(self, page: Page, path: Sequence[Page], view: View) -> None:
        super().__init__()
        self.page = page
        self._path = [*path, page]
        self._view = view

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield TextLines(self._where, fixed=1)
        yield TextLines(self._facts)
        yield RowTable(self.page.columns, identity=self.page.identity, style=self.page.style, empty=self.page.empty)
        yield TextLines(lambda _cells: [plain(f" Esc: back   {self.page.hint}   q: leave", DIM)], fixed=1)

    def on_mount(self) -> None:
        """Fill it."""
        self.show(self._view)
        table = self.query_one(RowTable)
        table.focus()
        if (start := self.page.start(self._view)) is not None:
            table.select(start)

    @property
    def current(self) -> Any:
        """The row under the cursor."""
        return self.query_one(RowTable).current

    def show(self, view: View) -> None:
        """Take a newer view."""
        self._view = view
        for lines in self.query(TextLines):
            lines.show()
        # A view may come before the screen has its parts; on_mount shows it then.
        for table in self.query(RowTable):
            table.show(self.page.rows(view))

    def _where(self, cells: int) -> list[Line]:
        path = " › ".join(page.title(self._view) for page in self._path)
        return [plain(" " + fit(path, cells - 2), BOLD)]

    def _facts(self, cells: int) -> list[Line]:
        return self.page.facts(self._view)
