"""One rank: who it is, what it does, its communicators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.style import Style

from ncclwatch.dashboard import rows
from ncclwatch.dashboard.columns import ROW_STYLES
from ncclwatch.dashboard.communicator_page import CommunicatorPage
from ncclwatch.dashboard.lines import DIM, Line, plain
from ncclwatch.dashboard.page import (
    PLAIN,
    Page,
    fact,
    number,
    operation_line,
    operations_in,
    rank_name,
    rate_line,
)
from ncclwatch.dashboard.table import Column
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Communicator, ProxyOperation
from ncclwatch.view.frame import View, communicator_key
from ncclwatch.view.states import BY_LETTER
from ncclwatch.view.work_text import work_line


class RankComm(NamedTuple):
    """A communicator of one rank, with what the rank has open in it."""

    communicator: Communicator
    operations: tuple[ProxyOperation, ...]
    role: str


class RankPage(Page):
    """One process: who it is, what it does, its communicators."""

    empty = "no communicator was read (older views keep no memory image)"
    hint = "Enter: communicator   k: threads"
    columns: Sequence[Column[RankComm]] = (
        Column("COMMUNICATOR", 16, lambda r: f"{r.communicator.hash:016x}", lambda r: r.communicator.hash),
        Column("ROLE", 6, lambda r: r.role or "-", flexible=True),
        Column("RANK", 9, lambda r: f"{r.communicator.rank}/{r.communicator.nranks}", lambda r: r.communicator.rank, right=True),
        Column("OPEN", 5, lambda r: str(len(r.operations)), lambda r: len(r.operations), right=True),
        Column("OPCOUNT", 8, lambda r: number(r.communicator.op_count), lambda r: r.communicator.op_count, right=True),
        Column("RESULT", 14, lambda r: r.communicator.async_result or "-", flexible=True),
    )

    def __init__(self, key: ProcessKey) -> None:
        self.process = key

    def title(self, view: View) -> str:
        """``rank 2``."""
        window = view.window_of(self.process) if self.process else None
        return rank_name(window) if window else f"pid {self.process.pid if self.process else '?'} (gone)"

    def facts(self, view: View) -> list[Line]:
        """Identity, state, operation, rates."""
        window = view.window_of(self.process) if self.process else None
        if window is None or self.process is None:
            return [plain(" this process is watched no longer", DIM)]
        info = window.process
        letter = view.letters[view.place_of[self.process]]
        version = ".".join(map(str, info.version)) if info.version else "?"
        lines = [
            fact("state", f"{BY_LETTER[letter].word}; process {rows.state(window)}", ROW_STYLES[letter]),
            fact(
                "process",
                f"pid {info.pid} on {info.host}, GPU {number(window.gpu)}, NCCL {version}, {' '.join(info.command[:8])}",
            ),
            fact("operation", operation_line(window)),
            fact("rate", rate_line(window)),
        ]
        if window.work is not None:
            lines.append(fact("network", work_line(window.work)))
        if window.problem:
            lines.append(fact("not read", window.problem, Style(bold=True)))
        sample = view.frame.samples.get(self.process)
        if sample is not None and sample.unavailable:
            lines.append(fact("unknown", "; ".join(f"{name}: {why}" for name, why in list(sample.unavailable.items())[:4]), DIM))
        return lines

    def rows(self, view: View) -> Sequence[RankComm]:
        """Communicators, those with open operations first."""
        sample = view.frame.samples.get(self.process) if self.process else None
        if sample is None:
            return ()
        roles = {row.key: row.role for row in view.communicators}
        found = [RankComm(c, operations_in(sample, c), roles.get(communicator_key(c), "")) for c in sample.communicators]
        return sorted(found, key=lambda r: (-len(r.operations), -r.communicator.nranks, r.communicator.hash))

    def identity(self, row: RankComm) -> object:
        """The communicator."""
        return row.communicator.address

    def style(self, row: RankComm) -> Style:
        """Those in use stand out."""
        return PLAIN if row.operations else DIM

    def open(self, view: View, row: RankComm) -> Page | None:
        """All ranks of that communicator."""
        return CommunicatorPage(communicator_key(row.communicator), start=self.process)
