"""Lives of agents that an engine knows: what was heard of each, what its batches build on; all of it bounded."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from ncclwatch.messaging.reader import BatchReader

FORGET_PEER_S = 120.0
FORGET_LIFE_S = 3600.0
MAX_LIVES = 40_000
READERS_OF_A_HOST = 8
"""Lives of a host's agents, the newest, of which it stays known what their batches build on though they are silent: as many as an
agent names when it says hello, for what its predecessors left it sends first. Of the others it is known what was heard.
"""


@dataclass(slots=True)
class Life:
    """One life of an agent, over all its connections. Times are those of ``time.monotonic``."""

    job: str
    host: str
    reader: BatchReader
    heard: float
    upto: int = -1
    """The highest number of its batches that was heard."""
    asked_key: float = 0.0
    well: bool = False
    narrow: bool = False
    """Whether few looks at its node will do, and whether more are wanted."""


L = TypeVar("L", bound=Life)


def forget(lives: OrderedDict[str, L], now: float, readers_of_a_host: int = READERS_OF_A_HOST) -> None:
    """Let go of lives that were not heard for long, and of what the batches of a host's older lives build on."""
    for number in [number for number, life in lives.items() if now - life.heard > FORGET_LIFE_S]:
        del lives[number]
    newer: Counter[tuple[str, str]] = Counter()
    for life in reversed(lives.values()):
        newer[life.job, life.host] += 1
        if newer[life.job, life.host] > readers_of_a_host and now - life.heard > FORGET_PEER_S:
            life.reader.forget()
