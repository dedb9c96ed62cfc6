"""One communicator over all its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.style import Style

from ncclwatch.collect.windows import RankWindow
from ncclwatch.dashboard import rows
from ncclwatch.dashboard.columns import ROW_STYLES
from ncclwatch.dashboard.lines import BOLD, DIM, Line, plain
from ncclwatch.dashboard.operation_page import OperationPage
from ncclwatch.dashboard.page import (
    Page,
    fact,
    number,
    operations_in,
    steps_done,
)
from ncclwatch.dashboard.table import Column
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import ProxyOperation
from ncclwatch.view.frame import CommunicatorKey, CommunicatorRow, Member, View
from ncclwatch.view.states import BY_LETTER
from ncclwatch.view.steps import operation_name


class MemberRow(NamedTuple):
    """A rank of a communicator; ``member`` is ``None`` when nobody observes it."""

    rank: int
    member: Member | None
    window: RankWindow | None
    letter: str
    operations: tuple[ProxyOperation, ...]


MAX_MEMBERS = 1 << 16


def _member_operation(row: MemberRow) -> str:
    if row.member is None:
        return "not observed"
    if not row.operations:
        window = row.window
        if window is not None and window.operation is not None and window.operation.comm_hash == row.member.communicator.hash:
            return rows.operation_text(window)
        # Where no proxy is involved an operation under way does not show.
        return "none in the proxy" if row.member.communicator.host_connections else "nothing open"
    names = {operation_name(operation) for operation in row.operations}
    return ", ".join(sorted(names)[:3])


def _member_steps(row: MemberRow) -> str:
    done, total = steps_done(row.operations)
    return f"{done}/{total}" if total else ""


class CommunicatorPage(Page):
    """All ranks of a communicator, in the middle of what, and those that nobody observes."""

    hint = "Enter: channels and steps   k: threads"
    columns: Sequence[Column[MemberRow]] = (
        Column("RANK", 6, lambda r: str(r.rank), lambda r: r.rank, right=True),
        Column("JOB RANK", 8, lambda r: number(r.window.rank if r.window else None), right=True),
        Column("STATE", 14, lambda r: f"{r.letter} {BY_LETTER[r.letter].word}", lambda r: BY_LETTER[r.letter].urgency),
        Column("OPERATION HERE", 18, _member_operation, flexible=True),
        Column("STEPS", 12, _member_steps, lambda r: steps_done(r.operations)[0], right=True),
        Column("AGE", 7, lambda r: rows.age(r.window) if r.window and r.operations else "", right=True),
        Column("HOST", 8, lambda r: r.window.process.host if r.window else "", flexible=True),
        Column("PID", 8, lambda r: str(r.member.key.pid) if r.member else "", right=True),
    )

    def __init__(self, key: CommunicatorKey, start: ProcessKey | None = None) -> None:
        self.key = key
        self.process = start

    def title(self, view: View) -> str:
        """``communicator 766ee964``."""
        return f"communicator {self.key[0]:016x}"

    def _row(self, view: View) -> CommunicatorRow | None:
        return view.communicator(self.key)

    def facts(self, view: View) -> list[Line]:
        """Size, role, what is open in it, counters that differ."""
        row = self._row(view)
        if row is None:
            return [plain(" no observed process has this communicator now", DIM)]
        lines = [
            fact("ranks", f"{row.nranks}, of which {len(row.members)} observed" + (f"; {row.role}" if row.role else "")),
            fact("open", ", ".join(row.operations) or "nothing"),
        ]
        states = {m.communicator.async_result for m in row.members if m.communicator.async_result not in (None, "ncclSuccess")}
        if states:
            lines.append(fact("result", ", ".join(sorted(str(s) for s in states)), BOLD))
        return lines

    def rows(self, view: View) -> Sequence[MemberRow]:
        """Every rank; one that no process was read of is there too."""
        row = self._row(view)
        if row is None:
            return ()
        members = {member.communicator.rank: member for member in row.members}
        found = []
        for rank in range(min(row.nranks, MAX_MEMBERS)):
            member = members.get(rank)
            if member is None:
                found.append(MemberRow(rank, None, None, ".", ()))
                continue
            place = view.place_of.get(member.key)
            window = view.frame.windows[place] if place is not None else None
            letter = view.letters[place] if place is not None else "?"
            found.append(
                MemberRow(rank, member, window, letter, operations_in(view.frame.samples[member.key], member.communicator))
            )
        return found

    def identity(self, row: MemberRow) -> object:
        """The rank."""
        return row.rank

    def start(self, view: View) -> object:
        """The rank we came from."""
        row = self._row(view)
        return next((m.communicator.rank for m in row.members if m.key == self.process), None) if row else None

    def style(self, row: MemberRow) -> Style:
        """Colour by state."""
        return ROW_STYLES[row.letter]

    def open(self, view: View, row: MemberRow) -> Page | None:
        """Channels and steps of that rank."""
        return OperationPage(row.member.key, self.key) if row.member is not None else None
