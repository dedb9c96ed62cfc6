"""The ranks of a view as rows: those in trouble first. Of thousands of ranks only the rows that are drawn are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

from ncclwatch.collect.windows import RankWindow
from ncclwatch.view.frame import View
from ncclwatch.view.states import URGENCY


class RankRow(NamedTuple):
    """A rank's window and the letter of its state."""

    window: RankWindow
    letter: str


class RankRows(Sequence[RankRow]):
    """Rows made when they are drawn: of thousands of ranks a few dozen are."""

    def __init__(self, view: View, order: Sequence[int]) -> None:
        self._windows, self._letters, self._order = view.frame.windows, view.letters, order

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> RankRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[RankRow]: ...
    def __getitem__(self, index: int | slice) -> RankRow | list[RankRow]:
        if isinstance(index, slice):
            return [RankRow(self._windows[i], self._letters[i]) for i in self._order[index]]
        place = self._order[index]
        return RankRow(self._windows[place], self._letters[place])


def rank_rows(view: View) -> Sequence[RankRow]:
    """All ranks: those in trouble first, the others in order."""
    letters = view.letters
    urgent = [i for i, letter in enumerate(letters) if letter in "XDT?"] if not set(letters).isdisjoint("XDT?") else []
    if not urgent:
        return RankRows(view, range(len(letters)))
    first = set(urgent)
    urgent.sort(key=lambda i: URGENCY[letters[i]])
    return RankRows(view, [*urgent, *(i for i in range(len(letters)) if i not in first)])
