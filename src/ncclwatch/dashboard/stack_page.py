"""The threads of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ncclwatch.dashboard.lines import BOLD, DIM, Line, plain
from ncclwatch.dashboard.page import (
    Page,
)
from ncclwatch.dashboard.table import Column
from ncclwatch.model.identity import ProcessKey
from ncclwatch.target.threads import ThreadRow
from ncclwatch.text import clean
from ncclwatch.view.frame import View


@dataclass(frozen=True, slots=True)
class StackText:
    """Threads and Python frames of a process at one moment."""

    threads: tuple[ThreadRow, ...]
    python: tuple[str, ...]


class StackPage(Page):
    """Threads of one process. Read when the page is opened and when ``k`` is pressed again, by the reader the source gives."""

    hint = "k: read again"
    empty = "no thread was read"
    columns: Sequence[Column[ThreadRow]] = (
        Column("TID", 8, lambda r: str(r.tid), lambda r: r.tid, right=True),
        Column("THREAD", 16, lambda r: r.name, lambda r: r.name),
        Column("STATE", 10, lambda r: r.state, lambda r: r.state),
        Column("IN CALL", 16, lambda r: r.call, lambda r: r.call),
        Column("SLEEPS IN", 20, lambda r: r.wchan, lambda r: r.wchan, flexible=True),
    )

    def __init__(self, process: ProcessKey, read: Callable[[ProcessKey], StackText | str] | None = None) -> None:
        self.process = process
        self.read = read
        self.text: StackText | None = None
        self.problem = ""

    def title(self, view: View) -> str:
        """``threads``."""
        return "threads"

    def load(self) -> None:
        """Read; meant for a thread of its own."""
        if self.read is None or self.process is None:
            self.problem = "threads can be read only on the node of the process, while it lives"
            return
        found = self.read(self.process)
        if isinstance(found, str):
            self.problem = found
        else:
            self.text, self.problem = found, ""

    def facts(self, view: View) -> list[Line]:
        """Python frames, or why there are none."""
        if self.problem:
            return [plain(f" {clean(self.problem, 300)}", BOLD)]
        if self.text is None:
            return [plain(" reading …", DIM)]
        return [plain(f" {line}") for line in self.text.python[:12]]

    def rows(self, view: View) -> Sequence[ThreadRow]:
        """The threads."""
        return self.text.threads if self.text else ()

    def identity(self, row: ThreadRow) -> object:
        """The thread."""
        return row.tid
