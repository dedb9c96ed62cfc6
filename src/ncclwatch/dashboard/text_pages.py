"""Screens of text: help, and every verdict in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.screen import Screen
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ncclwatch.dashboard.lines import BOLD, DIM, PLAIN, Line, TextLines, plain
from ncclwatch.text import Style as TextStyle
from ncclwatch.text import clean, wrap
from ncclwatch.view.frame import View
from ncclwatch.view.states import STATES
from ncclwatch.view.verdict_text import verdict_lines
from ncclwatch.view.why import parts

KEYS = (
    ("1 … 9, Tab", "the views; Tab moves between the grid and the table"),
    ("↑ ↓ PgUp PgDn, wheel", "move"),
    ("Enter, click", "open: rank → communicator → operation → channels and steps → threads"),
    ("Esc, Backspace", "back"),
    ("k", "threads of the rank under the cursor: state, system call, kernel function; Python frames with py-spy"),
    ("v  p", "the verdicts in full, v again: why; paths of flows, and where they crowd (--paths FILE)"),
    ("/", "show only rows with these words; Esc ends it"),
    ("s  r, click on a heading", "sort by the next column; turn the order round"),
    ("l", "in Delays: completion latencies, or waits"),
    ("Space", "stop the picture (watching goes on), and go on"),
    ("[  ]", "one sample back, one forward;  { and } ten"),
    ("e", "back to now"),
    ("<  >,  -  +", "in a recording: 10 s back or forward; slower or faster"),
    ("S", "save a snapshot (ncclwatch diagnose reads it)"),
    ("R", "begin or end a recording (ncclwatch replay shows it)"),
    ("?", "this help"),
    ("q, Ctrl-C", "leave; the job goes on"),
)


HEADING = Style(color="cyan")
WHY = plain(" WHY", BOLD)


class Scrolled(ScrollView, can_focus=True):
    """Lines that scroll."""

    DEFAULT_CSS = "Scrolled { height: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "scroll_up", show=False),
        Binding("down", "scroll_down", show=False),
        Binding("pageup", "page_up", show=False),
        Binding("pagedown,space", "page_down", show=False),
        Binding("home", "scroll_home", show=False),
        Binding("end", "scroll_end", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Line] = []

    def show(self, lines: Sequence[Line]) -> None:
        """Take the lines."""
        if list(lines) != self._lines:
            self._lines = list(lines)
            self.virtual_size = Size(self.size.width, len(self._lines))
            self.refresh()

    def jump(self, mark: Line) -> None:
        """Bring the next line like this to the top; from the last one back to the first line."""
        now = self.scroll_offset.y
        places = [place for place, line in enumerate(self._lines) if line == mark]
        # At the very end a mark that is in sight cannot come to the top.
        below = [place for place in places if place > now] if now < self.max_scroll_y else []
        self.scroll_to(y=below[0] if below else 0, animate=False)

    def render_line(self, y: int) -> Strip:
        """One line."""
        place = y + self.scroll_offset.y
        if place >= len(self._lines):
            return Strip.blank(self.size.width, self.rich_style)
        segments = [Segment(text, style) for text, style in self._lines[place]]
        return Strip(segments).adjust_cell_length(self.size.width).apply_style(self.rich_style)


class TextScreen(Screen[None]):
    """Text made from the newest view."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace,question_mark,q", "app.pop_screen", show=False),
        Binding("v", "why", show=False),
    ]

    def __init__(self, title: str, build: Callable[[View | None, int], Sequence[Line]], view: View | None) -> None:
        super().__init__()
        self._title = title
        self._build = build
        self._view = view

    def compose(self):  # type: ignore[no-untyped-def]
        """A title and the text."""
        yield TextLines(lambda cells: [plain(f" {self._title}   Esc: back".ljust(cells), BOLD)], fixed=1)
        yield Scrolled()

    def on_mount(self) -> None:
        """Fill it."""
        self.query_one(TextLines).show()
        self.query_one(Scrolled).focus()
        self.show(self._view)

    def show(self, view: View | None) -> None:
        """Take a newer view."""
        self._view = view
        for text in self.query(Scrolled):
            # Its scroll bar takes two cells of each line.
            text.show(self._build(view, (self.size.width or 80) - text.styles.scrollbar_size_vertical))

    def action_why(self) -> None:
        """How the next verdict came about; from the last one back to the top."""
        self.query_one(Scrolled).jump(WHY)

    def on_resize(self) -> None:
        """Another width wraps elsewhere."""
        self.show(self._view)


def help_text(_view: View | None, cells: int) -> list[Line]:
    """Keys and the letters of states."""
    lines: list[Line] = [plain("")]
    for keys, what in KEYS:
        first, *rest = wrap(what, max(cells - 27, 20))
        lines.append(((f" {keys:<24} ", BOLD), (first, plain("")[0][1])))
        lines += [plain(" " * 26 + line.strip()) for line in rest]
    lines += [plain(""), plain(" A rank is shown by its state:", BOLD)]
    meanings = {
        "X": "a verdict names it",
        "D": "its process has ended",
        "T": "its process is stopped (signal, debugger)",
        "?": "its memory could not be read at the last try",
        "s": "an operation is open and nothing moves",
        "w": "a verdict counts it among those held up",
        ".": "of the job, but not looked at (other node, or not named)",
        "i": "no operation is open",
        "r": "its counters move",
    }
    for state in STATES:
        text = f" {state.word:<13} {meanings[state.letter]}"
        lines.append(((" ", Style()), (f" {state.letter} ", Style.parse(state.style)), (text, Style())))
    return lines


def verdict_text(view: View | None, cells: int) -> list[Line]:
    """Every verdict with its evidence, and how it came about."""
    if view is None or not view.frame.verdicts:
        return [plain(" no verdict yet: one more sample is needed")]
    lines: list[Line] = []
    for verdict in view.frame.verdicts:
        for i, line in enumerate(verdict_lines(verdict, TextStyle(enabled=False))):
            lines += [plain(f" {part}", BOLD if i == 0 else PLAIN) for part in wrap(line, cells - 2)]
        lines += [plain(""), WHY]
        for part in parts(verdict):
            lines += [plain(f" {text}", HEADING) for text in wrap(f"  {clean(part.heading, 200)}", cells - 2)]
            if part.because:
                lines += [plain(f" {text}", DIM) for text in wrap(f"    because: {clean(part.because, 300)}", cells - 2)]
            lines += [plain(f" {text}") for line in part.lines for text in wrap(f"    - {clean(line, 500)}", cells - 2)]
        lines.append(plain(""))
    return lines
