"""Lines of text in a widget of their own height; drawn again only when they changed. No markup is ever interpreted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget

Span = tuple[str, Style]
"""Text of one style, already cleaned."""
Line = Sequence[Span]

PLAIN = Style()
DIM = Style(dim=True)
BOLD = Style(bold=True)


def plain(text: str, style: Style = PLAIN) -> Line:
    """A line of one style."""
    return ((text, style),)


class TextLines(Widget):
    """Shows what ``build`` makes for the width at hand; ``show`` asks for it anew."""

    DEFAULT_CSS = "TextLines { height: auto; width: 1fr; }"

    def __init__(self, build: Callable[[int], Sequence[Line]], *, fixed: int = 0, id: str | None = None) -> None:
        super().__init__(id=id)
        self._build = build
        self._fixed = fixed
        self._lines: list[Line] = []
        if fixed:
            self.styles.height = fixed

    def show(self) -> None:
        """Build the lines and draw them if they differ from those on the screen."""
        lines = list(self._build(self.size.width or self.app.size.width))
        if lines != self._lines:
            taller = len(lines) != len(self._lines) and not self._fixed
            self._lines = lines
            self.refresh(layout=taller)

    def on_resize(self) -> None:
        """Another width wraps elsewhere."""
        self.show()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """As many lines as there are."""
        return self._fixed or len(self._lines)

    def render_line(self, y: int) -> Strip:
        """One line, cut at the right edge."""
        if y >= len(self._lines):
            return Strip.blank(self.size.width, self.rich_style)
        segments = [Segment(text, style) for text, style in self._lines[y]]
        return Strip(segments).adjust_cell_length(self.size.width, self.rich_style).apply_style(self.rich_style)
