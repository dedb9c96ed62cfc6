"""What is asked of every batch that comes over a bus, before it is decoded: whose it is, and whether its node says too much."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ncclwatch.messaging import packing, subjects
from ncclwatch.messaging.limits import APART, MAX_COUNT, FormatError

RATE, BURST = 50.0, 12_000.0
"""Batches a second that are heard of one node, and how many at once: a spool of an hour; a node says two or three a second."""
_LIFE = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_NUMBER = re.compile(r"[0-9]{1,19}\Z")


@dataclass(slots=True)
class Allowance:
    """What of one node may still be heard, by the server's clock (ns)."""

    left: float
    at_ns: int

    def take(self, at_ns: int) -> bool:
        """Whether a batch that was stored at ``at_ns`` is within it."""
        self.left = min(BURST, self.left + max(0, at_ns - self.at_ns) / 1e9 * RATE)
        self.at_ns = max(self.at_ns, at_ns)
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True


def allowance(at_ns: int) -> Allowance:
    """That of a node of which nothing was heard before."""
    return Allowance(BURST, at_ns)


def marks(headers: Mapping[str, str]) -> tuple[str, int]:
    """Life and number of a batch by its headers; raises ``FormatError``."""
    life, n, fmt = (headers.get(name, "") for name in (subjects.LIFE, subjects.NUMBER, subjects.FORMAT))
    if not _LIFE.match(life) or not _NUMBER.match(n) or not _NUMBER.match(fmt) or int(n) > MAX_COUNT:
        raise FormatError("a batch without the headers that say whose it is")
    if abs(int(fmt) - packing.VERSION) > 1:
        raise FormatError(f"a batch of format {int(fmt)} cannot be read here (format {packing.VERSION})", APART)
    return life, int(n)
