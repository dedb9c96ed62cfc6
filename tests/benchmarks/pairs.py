"""Spans of one running job with and without an agent, by turns, and the line of a table that they give."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

HEAD = ("case", "ranks", "a second", "with / without", "lowest to highest", "agent", "a rank", "memory", "lost", "beside")


@dataclass(frozen=True, slots=True)
class Span:
    """Some seconds of a job: iterations a second; with an agent shares of a core, MiB, processes watched, and records lost."""

    rate: float
    agent: float = 0.0
    engine: float = 0.0
    memory: float = 0.0
    processes: int = 0
    lost: int = 0


@dataclass(slots=True)
class Pairs:
    """Spans by turns."""

    without: list[Span] = field(default_factory=list)
    attached: list[Span] = field(default_factory=list)

    def add(self, plain: Callable[[], Span], watched: Callable[[], Span]) -> None:
        """One more pair, the other way round than the one before."""
        if len(self.without) % 2:
            self.attached.append(watched())
            self.without.append(plain())
        else:
            self.without.append(plain())
            self.attached.append(watched())

    @property
    def lost(self) -> int:
        """Records lost in all spans."""
        return sum(span.lost for span in self.attached)

    def agent(self) -> float:
        """The agent's share of a core, the mean: one span is no more than some ticks of 10 ms."""
        return statistics.fmean(span.agent for span in self.attached)

    def memory(self) -> float:
        """Its resident memory, MiB."""
        return statistics.median(span.memory for span in self.attached)


def spread(values: Sequence[float]) -> tuple[str, str]:
    """Median, and lowest to highest."""
    return f"{statistics.median(values):.3f}", f"{min(values):.3f} to {max(values):.3f}"


def row(name: str, ranks: int, pairs: Pairs, beside: str, memory: str | None = None) -> tuple[str, ...]:
    """One line of the table; what is known of memory alone is given in words."""
    ratio, span = spread([b.rate / a.rate for a, b in zip(pairs.without, pairs.attached, strict=True)])
    pace = f"{statistics.median(one.rate for one in pairs.without):,.1f}"
    share = pairs.agent()
    memory = f"{pairs.memory():.0f} MiB" if memory is None else memory
    return (name, str(ranks), pace, ratio, span, f"{share:.2%}", f"{share / ranks:.2%}", memory, str(pairs.lost), beside)
