"""A moment of a job as bytes: whole for who comes new, or what changed since the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any

import msgspec
import numpy as np

from ncclwatch.remote.iterations import Timed
from ncclwatch.remote.job_view import NodeLine
from ncclwatch.serve.moment import MAX_KEPT_ITERATIONS, Extra, point_of, sections
from ncclwatch.view.frame import View
from ncclwatch.view.waits import Pair, matrix

MAX_WAITS = 60
"""Samples added up in the delay matrix."""
MANY, WAITS_OF_MANY = 512, 5
"""Of jobs above so many ranks only so many samples: each costs time in proportion to ranks and channels."""
CELLS_SHARE = 8
"""Cells are sent one by one while fewer than one in so many has changed, else the grid is sent whole."""

_encode = msgspec.json.Encoder(decimal_format="number").encode


@dataclass(frozen=True)
class Snapshot:
    """One moment. ``parts`` are JSON by name; ``n`` counts the moments of a job, ``time`` is seconds since the epoch."""

    job: str
    n: int
    time: float
    parts: dict[str, bytes]
    letters: str
    ranks: Sequence[int | None] | None
    point: list[Any]
    verdict: str
    """Id of the worst verdict."""

    @cached_property
    def whole(self) -> bytes:
        """Everything, as JSON."""
        return self._message(None, self.parts, b"")

    def since(self, before: Snapshot) -> bytes:
        """What is different from the moment before, as JSON."""
        changed = {name: part for name, part in self.parts.items() if before.parts.get(name) != part}
        cells = self._cells(before) if "grid" in changed else None
        if cells is not None:
            del changed["grid"]
        return self._message(before.n, changed, b'"cells":' + _encode(cells) + b"," if cells is not None else b"")

    def _cells(self, before: Snapshot) -> list[list[Any]] | None:
        """[place, letter] of the cells that changed; ``None`` where the grid is another, or most of it is."""
        if len(self.letters) != len(before.letters) or self.ranks != before.ranks:
            return None
        ours, theirs = (np.frombuffer(text.encode("ascii"), np.uint8) for text in (self.letters, before.letters))
        different = ours != theirs
        if int(different.sum()) * CELLS_SHARE > len(self.letters):
            return None
        return [[at, letter] for at, letter in compress(enumerate(self.letters), different.tolist())]

    def _message(self, after: int | None, parts: dict[str, bytes], cells: bytes) -> bytes:
        told = b",".join(b'"%s":%s' % (name.encode(), part) for name, part in parts.items())
        head = _encode({"job": self.job, "n": self.n, "after": after, "time": self.time, "point": self.point})
        return b"%s,%s%s{%s}}" % (head[:-1], cells, b'"parts":', told)


class Composer:
    """Makes the moments of one job of its views, and remembers what a view alone does not hold: iterations, and recent waits."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._number = 0
        self._waits: deque[set[Pair]] = deque(maxlen=MAX_WAITS)
        self._iterations: deque[Timed] = deque(maxlen=MAX_KEPT_ITERATIONS)

    def take(self, view: View) -> None:
        """Remember what a view says of iterations."""
        newest = self._iterations[-1][0] if self._iterations else 0.0
        # The reference may change, and clocks are set anew at every look: an iteration is told once all the same.
        self._iterations.extend(one for one in view.frame.iterations if one[0] - newest > min(0.5 * one[1], 0.5))

    def compose(self, view: View, nodes: Sequence[NodeLine] = (), behind_s: float = 0.0) -> Snapshot:
        """The moment of a view."""
        self._number += 1
        if view.frame.samples:
            self._waits.append(view.waits)
        recent = list(self._waits)[-WAITS_OF_MANY:] if len(view.frame.windows) > MANY else self._waits
        ranks = [window.rank for window in view.frame.windows if window.rank is not None]
        extra = Extra(matrix(recent, ranks), tuple(self._iterations), nodes, behind_s)
        found = sections(view, extra)
        return Snapshot(
            self._job, self._number, round(view.frame.time, 3), {name: _encode(part) for name, part in found.items()},
            view.grid.letters, found["grid"]["ranks"], point_of(view), view.verdict.id if view.verdict is not None else "",
        )  # fmt: skip
