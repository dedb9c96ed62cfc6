"""What failed in a job, in the order of time, as lines: what many ranks of a host did alike is one line."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import groupby

from ncclwatch.model.failure import Failure, Place
from ncclwatch.model.verdict import Verdict
from ncclwatch.text import clean, ranks

WORDS = {Place.FIRST: "first", Place.PERHAPS: "perhaps first", Place.BEFORE: "before that"}


def failure_lines(verdict: Verdict) -> tuple[str, ...]:
    """``12:00:01.234 first: rank 2 on node1, pid 4711: killed by SIGKILL``, then ``+0.31 s ± 2 ms: …``."""
    groups = groupby(verdict.failures, key=lambda one: (one.place, one.host, one.words, one.rank is None))
    return tuple(_line(list(found)) for _, found in groups)


def _line(alike: Sequence[Failure]) -> str:
    first, last = alike[0], alike[-1]
    known = [one.rank for one in alike if one.rank is not None]
    who = f"{ranks(known)} on {clean(first.host, 64)}" if known else clean(first.host, 64)
    who += f", pid {first.pid}" if len(alike) == 1 and first.pid is not None else ""
    # From a socket it may be any number.
    when = f"{datetime.fromtimestamp(first.time):%H:%M:%S.%f}"[:-3] if 0 < first.time < 1 << 32 else "?"
    if first.place is not Place.FIRST:
        when = f"{when} {_seconds(first.after_s)}" + (f" to {_seconds(last.after_s)}" if last is not first else "")
        when += " (clocks not compared)" if first.error_s is None else f" ± {_short(first.error_s)}"
    word = WORDS.get(first.place, "")
    return f"{when}{' ' if word else ''}{word}: {who}: {clean(first.words, 200)}"


def _seconds(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '−'}{_short(abs(seconds))}"


def _short(seconds: float) -> str:
    """``0.31 s``, ``12 ms``."""
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.0f} ms"
