"""The live dashboard (Textual): title, verdict, the views by number, footer. It only ever draws; watching goes on elsewhere."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import ContentSwitcher, Input

from ncclwatch.dashboard import text_pages
from ncclwatch.dashboard.banner import banner
from ncclwatch.dashboard.communicator_page import CommunicatorPage
from ncclwatch.dashboard.detail import DetailScreen
from ncclwatch.dashboard.footer import footer
from ncclwatch.dashboard.grid import RankGrid
from ncclwatch.dashboard.history import History
from ncclwatch.dashboard.lines import Line, TextLines
from ncclwatch.dashboard.page import Page
from ncclwatch.dashboard.paths_page import paths_text
from ncclwatch.dashboard.rank_page import RankPage
from ncclwatch.dashboard.source import Source
from ncclwatch.dashboard.stack_page import StackPage
from ncclwatch.dashboard.table import RowTable
from ncclwatch.dashboard.tabs import TABS, TabLine
from ncclwatch.dashboard.title import title
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.identity import ProcessKey
from ncclwatch.text import clean
from ncclwatch.view.frame import CommunicatorRow, OperationRow, View
from ncclwatch.view.ranks import RankRow

if TYPE_CHECKING:
    from ncclwatch.model.paths import Probe

REDRAW_S = 0.5
RECENT = 30
"""Samples that the delay matrix adds up."""


class Dashboard(App[str]):
    """Shows the views of a source until it ends or the user leaves. Its return value says why it ended."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; }
    #ranks { height: 1fr; }
    #ranks RankGrid { margin-bottom: 1; }
    ContentSwitcher { height: 1fr; }
    #grid { height: 1fr; }
    Input { height: 1; border: none; padding: 0 1; display: none; }
    Input.open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c,ctrl+q", "leave", "Leave", priority=True),
        Binding("question_mark", "help", "Help"),
        Binding("space", "pause", "Pause"),
        Binding("left_square_bracket", "look(-1)"),
        Binding("right_square_bracket", "look(1)"),
        Binding("left_curly_bracket", "look(-10)"),
        Binding("right_curly_bracket", "look(10)"),
        Binding("e", "now"),
        Binding("slash", "filter"),
        Binding("escape", "undo"),
        Binding("v", "verdict"),
        Binding("p", "paths"),
        Binding("k", "stack"),
        Binding("S", "save"),
        Binding("R", "record"),
        Binding("less_than_sign", "seek(-10)"),
        Binding("greater_than_sign", "seek(10)"),
        Binding("plus", "faster(2.0)"),
        Binding("minus", "faster(0.5)"),
        *[Binding(str(i + 1), f"tab({i})") for i in range(len(TABS))],
    ]

    def __init__(self, source: Source, *, history: History | None = None, probes: Sequence[Probe] = ()) -> None:
        super().__init__()
        self.probes = probes
        """What 'ncclwatch paths probe' told of the ways of flows."""
        self.source = source
        self.history = history or History()
        self.past: int | None = None
        """Index of the view of the past that is shown; ``None`` shows what is newest."""
        self._said = ""
        self._stop_told = False

    # --- parts ---------------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield TextLines(self._title_line, fixed=1, id="title")
        yield TextLines(self._banner_lines, id="banner")
        yield TabLine()
        with ContentSwitcher(initial=TABS[0].id):
            for tab in TABS:
                yield tab.make(tab.id, self.recent)
        yield Input(placeholder="words to look for", compact=True)
        yield TextLines(self._footer_lines, fixed=2, id="footer")

    def on_mount(self) -> None:
        """Begin to draw."""
        # Views of thousands of ranks are many small objects that live for minutes and hold no cycles: looking through all of them
        # for garbage at every few hundred new ones costs more than drawing.
        gc.set_threshold(50_000, 20, 50)
        self._fit()
        self._focus()
        self.set_interval(REDRAW_S, self.redraw)
        self.redraw()

    @property
    def view(self) -> View | None:
        """The view that is shown."""
        if not self.history.views:
            return None
        if self.past is None:
            return self.history.views[-1]
        return self.history.views[min(self.past, len(self.history.views) - 1)]

    def recent(self) -> list[View]:
        """The views of the last seconds up to the one that is shown, for what is added up over time."""
        last = len(self.history.views) if self.past is None else self.past + 1
        return self.history.views[max(last - RECENT, 0) : last]

    def redraw(self) -> None:
        """Take what came and draw what changed."""
        shown = self.view
        for view in self.source.take():
            if self.history.views and view.frame.time < self.history.views[-1].frame.time:
                # A recording was sought back: what it showed from there on is no past.
                self.history, self.past = History(), None
            self.history.add(view)
        if self.past is not None and shown is not None:
            # The past may have been thinned: stay at the same moment.
            self.past = self.history.nearest(shown.frame.time)
        self._show()
        if self.source.finished and not self._stop_told:
            self._stop_told = True
            if self.source.label.startswith("LIVE"):
                self.exit(self.source.finished)
            else:
                self.say(self.source.finished)

    def _show(self) -> None:
        main = next(iter(self.screen_stack), None)
        if main is None or not main.query(TabLine) or not main.query(ContentSwitcher):
            # The timer may strike while the screen is being built, or taken down.
            return
        for lines in main.query(TextLines):
            lines.show()
        view = self.view
        if view is None:
            return
        if self.screen is main:
            tab = TABS[self._tab]
            tab.show(main.query_one(f"#{tab.id}"), view)
        elif isinstance(self.screen, (DetailScreen, text_pages.TextScreen)):
            self.screen.show(view)

    @property
    def _tab(self) -> int:
        return self.screen_stack[0].query_one(TabLine).active

    # --- text ----------------------------------------------------------------------------------------------------------

    def _title_line(self, cells: int) -> list[Line]:
        newest = self.history.views[-1] if self.history.views else None
        return [title(self.view, newest, self.source, cells, paused=self.past is not None)]

    def _banner_lines(self, cells: int) -> list[Line]:
        view = self.view
        height = self.size.height
        return banner(view.frame.verdicts if view else (), cells, 5 if height < 30 else 8 if height < 50 else 12)

    def _footer_lines(self, cells: int) -> list[Line]:
        return footer(self.view, self._said, cells)

    def say(self, text: str) -> None:
        """A line at the bottom, for a while."""
        self._said = clean(text, 300)
        self.query_one("#footer", TextLines).show()
        self.set_timer(6.0, self._unsay)

    def _unsay(self) -> None:
        self._said = ""

    # --- keys ----------------------------------------------------------------------------------------------------------

    def action_leave(self) -> None:
        """Leave; the source is told to stop."""
        self.source.stop()
        self.exit("interrupted")

    def action_tab(self, index: int) -> None:
        """Show one of the views."""
        if len(self.screen_stack) > 1:
            return
        line = self.query_one(TabLine)
        line.active = index
        line.show()
        self.query_one(ContentSwitcher).current = TABS[index].id
        self._focus()
        self._filter("")
        self._show()

    def action_help(self) -> None:
        """Keys and letters."""
        self.push_screen(text_pages.TextScreen("Help", text_pages.help_text, self.view))

    def action_verdict(self) -> None:
        """Verdicts in full."""
        self.push_screen(text_pages.TextScreen("Verdicts   v: why", text_pages.verdict_text, self.view))

    def action_paths(self) -> None:
        """Which way flows take."""
        build = partial(paths_text, self.probes)
        self.push_screen(text_pages.TextScreen("Paths of flows", build, self.view))

    def action_pause(self) -> None:
        """Stop the picture, or go on."""
        if self.past is None and self.source.hold():
            self._show()
            return
        self.past = len(self.history.views) - 1 if self.past is None and self.history.views else None
        self._show()

    def action_look(self, by: int) -> None:
        """Go to a view of the past."""
        last = len(self.history.views) - 1
        if last < 0:
            return
        self.past = min(max((last if self.past is None else self.past) + by, 0), last)
        self._show()

    def action_now(self) -> None:
        """Back to what is newest."""
        self.past = None
        self._show()

    def action_seek(self, seconds: float) -> None:
        """Move in a recording; live, in what is remembered."""
        if self.source.seek(seconds):
            self.past = None
            return
        view = self.view
        if view is not None:
            self.past = self.history.nearest(view.frame.time + seconds)
            self._show()

    def action_faster(self, factor: float) -> None:
        """Change the speed of a recording."""
        if not self.source.faster(factor):
            self.say("speed can be changed in a recording only")

    def action_filter(self) -> None:
        """Open the line for words to look for."""
        if self._filtered() is None:
            return
        field = self.query_one(Input)
        field.add_class("open")
        field.focus()

    def action_undo(self) -> None:
        """End the filter, or the pause."""
        field = self.query_one(Input)
        if field.has_class("open") or field.value:
            field.value = ""
            self._filter("")
            field.remove_class("open")
            self._focus()
        elif self.past is not None:
            self.action_now()

    def action_stack(self) -> None:
        """Threads of the rank under the cursor."""
        screen = self.screen
        process = screen.page.process if isinstance(screen, DetailScreen) else self._process_here()
        if isinstance(screen, DetailScreen) and (row := screen.current) is not None and (key := _process_of(row)) is not None:
            process = key
        if process is None:
            self.say("choose a rank first")
            return
        if isinstance(screen, DetailScreen) and isinstance(screen.page, StackPage):
            self._load(screen.page)
            return
        self.open(StackPage(process, self.source.stack))

    def action_save(self) -> None:
        """Save a snapshot of the job."""
        self.say("saving a snapshot …")
        self._do(self.source.save)

    def action_record(self) -> None:
        """Begin or end a recording."""
        self._do(self.source.toggle_recording)

    @work(thread=True, group="files")
    def _do(self, what: Callable[[], str]) -> None:
        try:
            said = what()
        except (NcclwatchError, OSError) as error:
            said = str(error)
        self.call_from_thread(self.say, said)

    @work(thread=True, group="stack")
    def _load(self, page: StackPage) -> None:
        page.load()
        self.call_from_thread(self._show)

    # --- drill down ----------------------------------------------------------------------------------------------------

    def open(self, page: Page) -> None:
        """Put a page on the screen."""
        if self.view is None:
            return
        if isinstance(page, StackPage):
            page.read = page.read or self.source.stack
            self._load(page)
        path = [screen.page for screen in self.screen_stack if isinstance(screen, DetailScreen)]
        self.push_screen(DetailScreen(page, path, self.view))

    def on_row_table_chosen(self, message: RowTable.Chosen) -> None:
        """A row of one of the views, or of a page, was opened."""
        view, row = self.view, message.row
        if view is None:
            return
        screen = self.screen
        if isinstance(screen, DetailScreen):
            page = screen.page.open(view, row)
        elif isinstance(row, RankRow):
            page = RankPage(row.window.process.key)
        elif isinstance(row, CommunicatorRow):
            page = CommunicatorPage(row.key)
        elif isinstance(row, OperationRow):
            found = next((c for c in view.communicators if c.hash == row.comm_hash), None)
            page = CommunicatorPage(found.key) if found else None
        else:
            page = None
        if page is not None:
            self.open(page)

    def on_rank_grid_chosen(self, message: RankGrid.Chosen) -> None:
        """A rank of the grid was opened."""
        view = self.view
        place = message.cell.window
        if view is None or place is None or place >= len(view.frame.windows):
            self.say(f"rank {message.cell.rank} is not observed: its node has no ncclwatch, or its pid was not named")
            return
        self.open(RankPage(view.frame.windows[place].process.key))

    def _process_here(self) -> ProcessKey | None:
        table = self._filtered()
        return _process_of(table.current) if table is not None and table.current is not None else None

    # --- filter and focus ----------------------------------------------------------------------------------------------

    def _filtered(self) -> RowTable[Any] | None:
        if len(self.screen_stack) > 1:
            return next(iter(self.screen.query(RowTable)), None) if isinstance(self.screen, DetailScreen) else None
        tab = TABS[self._tab]
        if not tab.table:
            return None
        widget = self.query_one(f"#{tab.id}")
        return widget if isinstance(widget, RowTable) else widget.query_one(RowTable)

    def _filter(self, needle: str) -> None:
        table = self._filtered()
        if table is not None and table.needle != needle:
            table.filter(needle)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while words are typed."""
        self._filter(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter and go back to the table."""
        if not event.value:
            event.input.remove_class("open")
        self._focus()

    def _focus(self) -> None:
        widget = self.query_one(f"#{TABS[self._tab].id}")
        table = self._filtered()
        (table if table is not None else widget).focus()

    def on_resize(self) -> None:
        """Give the small grid its share of the height."""
        self._fit()

    def _fit(self) -> None:
        with contextlib.suppress(LookupError):
            self.query_one("#ranks RankGrid", RankGrid).max_lines = max(2, min(16, (self.size.height - 8) // 4))


def _process_of(row: Any) -> ProcessKey | None:
    if isinstance(row, RankRow):
        return row.window.process.key
    member = getattr(row, "member", None)
    return member.key if member is not None else None
