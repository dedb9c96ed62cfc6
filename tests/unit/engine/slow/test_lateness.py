"""Hosts that begin iterations late: how much, in how many, and whether it costs anything."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from ncclwatch.collect.cadence import Cadence, Iteration
from ncclwatch.engine.slow.lateness import measure


def cadence(begins: list[float]) -> Cadence:
    made = Cadence()
    for number, (begin, end) in enumerate(itertools.pairwise(begins)):
        made.iterations.append(Iteration(begin, end, number))
    made.first = list(made.iterations)[:8]
    return made


def test_a_host_that_is_late_by_more_than_half_an_iteration_is_measured_by_the_iterations_numbers() -> None:
    durations = [0.5] * 10 + [0.9] * 12
    begins = [0.0, *np.cumsum(durations).tolist()]
    # The others begin when the last has ended; rank 0 only 0.55 s later, which is nearer to the others' next iteration.
    late = cadence([b + (0.55 if n >= 10 else 0.0) for n, b in enumerate(begins)])
    others = [cadence(begins) for _ in range(3)]
    for made in others[1:]:
        # They were counted from another iteration on, which the numbers' difference while all was well tells.
        made.iterations = deque(replace(i, number=i.number + 7) for i in made.iterations)
        made.first = list(made.iterations)[:8]
    measured = measure([late, *others], [5.0] * 4, 0.5, np.zeros(4, np.int64))
    assert measured.late[0] >= 10 and measured.seconds[0] == pytest.approx(0.55) and measured.share[0] > 0.3
    assert not measured.share[1:].any()
    others[2].first.clear()
    unknown = measure([late, *others], [5.0] * 4, 0.5, np.zeros(4, np.int64))
    assert unknown.share[3] == 0 and unknown.share[0] > 0.3, "its numbers cannot be compared"


def test_a_late_host_is_measured_and_believed_only_if_it_costs() -> None:
    equal = np.zeros(4, np.int64)
    costly = [0.2] * 6 + [0.5, 0.2] * 6
    for durations, believed in ((costly, True), ([0.2] * 18, False)):
        begins = [0.0, *np.cumsum(durations).tolist()]
        usual = [cadence(begins) for _ in range(3)]
        # Rank 2 begins every other iteration late; only where those are longer was anybody held up.
        late = cadence([b + (0.1 if n >= 6 and n % 2 == 0 else 0.0) for n, b in enumerate(begins)])
        measured = measure([usual[0], usual[1], late, usual[2]], [1.2] * 4, 0.2, equal)
        assert measured.late[2] >= 3 and (measured.share[2] > 0.1) == believed
        assert not measured.share[[0, 1, 3]].any()


def test_of_two_equals_the_past_tells_which_is_late_also_when_it_is_forgotten() -> None:
    begins = [0.0, *np.cumsum([0.2] * 6 + [0.5, 0.2] * 6).tolist()]
    usual = cadence(begins)
    late = cadence([b + (0.3 if n >= 6 and n % 2 == 0 else 0.0) for n, b in enumerate(begins)])
    pair = np.zeros(2, np.int64)
    measured = measure([usual, late], [1.2] * 2, 0.2, pair)
    assert measured.late.tolist() == [0, 6] and measured.share[1] > 0.3
    for made in (usual, late):
        made.iterations = deque(i for i in made.iterations if i.number >= 6)
    assert not measure([usual, late], [1.2] * 2, 0.2, pair).share.any(), "of two that differ nobody knows which is late"
    kept = measure([usual, late], [1.2] * 2, 0.2, pair, measured.usual)
    assert kept.late.tolist() == [0, 6] and kept.share[1] > 0.3
