"""Lines about trouble with peers: each kind at most once a minute, so that nobody can fill a log."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

EVERY_S = 60.0
MAX_NEWS, MAX_KINDS = 200, 1000


@dataclass(slots=True)
class Lines:
    """Lines that wait to be said; of a kind one a minute, with how often it was since."""

    news: list[str] = field(default_factory=list)
    last: OrderedDict[str, tuple[float, int]] = field(default_factory=OrderedDict)

    def tell(self, kind: str, text: str) -> None:
        """Say it, unless its kind was said just now."""
        at, more = self.last.get(kind, (0.0, 0))
        now = time.monotonic()
        if at and now - at < EVERY_S:
            self.last[kind] = (at, more + 1)
            return
        self.news.append(text + (f" ({more} times more since)" if more else ""))
        del self.news[:-MAX_NEWS]
        self.last[kind] = (now, 0)
        self.last.move_to_end(kind)
        if len(self.last) > MAX_KINDS:
            self.last.popitem(last=False)

    def take(self) -> list[str]:
        """What is to be said since the last time."""
        found, self.news = self.news, []
        return found
