"""Views of the past, so that a person can scroll back: bounded, thinned where it is long ago rather than cut off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ncclwatch.view.frame import View

MAX_VIEWS = 1800
MAX_WINDOWS = 48_000
"""Windows kept over all views: about 0.7 KB each."""
MAX_SAMPLES = 4_000
"""Samples kept besides those of the newest view; older ones can do without (no channels and steps there)."""


class History:
    """The views so far, oldest first. When the budget is used up, every second view of the older half is dropped."""

    def __init__(self, *, max_views: int = MAX_VIEWS, max_windows: int = MAX_WINDOWS, max_samples: int = MAX_SAMPLES) -> None:
        self.views: list[View] = []
        self._max_views = max_views
        self._max_windows = max_windows
        self._max_samples = max_samples

    def __len__(self) -> int:
        return len(self.views)

    def add(self, view: View) -> None:
        """Remember a view."""
        self.views.append(view)
        while len(self.views) > 2 and self._over(lambda v: len(v.frame.windows), self._max_windows, self._max_views):
            older = max(len(self.views) // 2, 2)
            # The very first stays: how it was in the beginning is worth knowing.
            self.views = [*self.views[0:older:2], *self.views[older:]] if older > 2 else [self.views[0], *self.views[2:]]
        self._drop_samples()

    def _over(self, weight: Callable[[View], int], budget: int, count: int) -> bool:
        return len(self.views) > count or sum(map(weight, self.views)) > budget

    def _drop_samples(self) -> None:
        held = 0
        for i in range(len(self.views) - 1, -1, -1):
            view = self.views[i]
            if not view.frame.samples:
                continue
            held += len(view.frame.samples)
            if held > self._max_samples and i < len(self.views) - 1:
                self.views[i] = View(replace(view.frame, samples={}))

    def nearest(self, time: float) -> int:
        """Index of the last view at or before ``time``; 0 when there is none."""
        return max((i for i, view in enumerate(self.views) if view.frame.time <= time), default=0)


def spark(values: Sequence[float | None], cells: int) -> str:
    """The last ``cells`` values as bars of eighths, scaled to the largest; a blank for a value that is not known."""
    shown = values[-cells:]
    top = max((value for value in shown if value is not None), default=0.0)
    bars = "▁▂▃▄▅▆▇█"
    out = [" " if v is None else bars[min(7, int(max(v, 0.0) / top * 7.999))] if top > 0 else bars[0] for v in shown]
    return "".join(out).rjust(cells)
