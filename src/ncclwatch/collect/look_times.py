"""When to look: nearly at multiples of the interval on a clock that all nodes have in common, each look a little later by a part
of the interval that never repeats.

Looks at exact multiples would show a job whose iteration takes just as long (or a half, or a third of it) at the same moment of
each iteration for as long as it runs: who computes at that moment would seem to compute all the time. The parts are those of the
multiples of the golden ratio, which spread evenly however few are taken, and which every node works out alike.
"""

from __future__ import annotations

import math

GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0

SPREAD = 0.5
"""The largest part of the interval a look comes later by. Two looks are 0.81 or 1.31 intervals apart, one on the average."""


def look_time(number: int, interval_s: float) -> float:
    """The time of a look by its number, seconds of the common clock."""
    return (number + SPREAD * (number * GOLDEN % 1.0)) * interval_s


def next_time(now_s: float, interval_s: float, *, after_s: float = 0.0) -> float:
    """The first time from ``now_s`` on at which a look was ``after_s`` (below an interval) ago, in seconds of the clock."""
    number = math.floor((now_s - after_s) / interval_s - SPREAD)
    while (time := look_time(number, interval_s) + after_s) < now_s:
        number += 1
    return time
