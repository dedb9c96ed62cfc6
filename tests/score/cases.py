"""A case: a scenario that was run, and what had been recorded of it by any moment. Expectations stay here, with the scorer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise, takewhile

import numpy as np

from ncclwatch.collect.ease import NARROW
from ncclwatch.collect.look_times import look_time
from ncclwatch.simulate.observe import Cast
from ncclwatch.simulate.records import Observer
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import PROGRAM_FAULTS, Scenario, ScoreClass
from ncclwatch.simulate.timeline import Timeline
from ncclwatch.simulate.wire import RecordSet
from score.stalls import stalled_in, where_it_stalled
from score.visible import SLOW_CLASSES, visibility

AFTER_HANG_S = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0)
AFTER_SLOW_S = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 15.0, 18.0, 24.0, 30.0)
AFTER_HANG_AT_SCALE_S = (3.0, 12.0)
"""A pipeline of 64 stages takes some seconds to come to stand."""
BEFORE_S = (2.0, 1.0, 0.3)
HISTORY_S = 30.0


@dataclass(slots=True)
class Moment:
    """What a diagnoser is shown: the records by now, and the time. ``since_effect_s`` is the scorer's alone."""

    records: RecordSet
    clock_s: float
    since_effect_s: float


class Case:
    """A simulated run of one scenario. ``shift`` moves the looks by so many of their schedule: when they fall is chance."""

    def __init__(self, scenario: Scenario, shift: int = 0) -> None:
        self.timeline: Timeline = simulate(scenario)
        self.scenario = where_it_stalled(scenario, stalled_in(self.timeline))
        self.cast = Cast(scenario)
        self.effect_s = effect(self.timeline)
        self._clocks = clocks(self.timeline, self.effect_s)
        period = scenario.observe.state_period_s
        first = max(0.5 * scenario.network.init_s, self._clocks[0] - HISTORY_S)
        looks = (first + look_time(number, period) - shift * period for number in count(shift))
        times = list(takewhile(lambda time: time <= self._clocks[-1] + 1e-9, looks))
        self.every = NARROW
        """Of so many samples one is a usual one; the others are there for who looks for a culprit."""
        if "scale" in scenario.tags:  # each look at thousands of ranks is costly: a few around each clock
            times = sorted({max(0.1, c - back) for c in self._clocks for back in (0.0, 1.0)} | _last_looks(self._clocks[-1]))
            self.every = 1
        times = list(_with_nearer(times, self.every))
        self._observer = Observer(self.timeline, times)

    def visible(self) -> bool | None:
        """Of a slow job: whether the fault shows in its own iteration times."""
        if self.scenario.expect.score_class not in SLOW_CLASSES:
            return None
        took = self.timeline.durations()
        took = took[np.isfinite(took)]
        ends = self.timeline.first_iteration_s + np.cumsum(took)
        watched = ends <= self._clocks[-1]
        pairs = list(zip(took[watched].tolist(), ends[watched].tolist(), strict=True))
        return visibility(self.scenario, pairs, self.effect_s, self._clocks[-1]).visible

    def moments(self) -> Iterator[Moment]:
        """What was recorded at each clock of the case; the observer has sent it through bytes, so only records pass."""
        for clock in self._clocks:
            yield Moment(self._observer.until(clock, history_s=HISTORY_S), clock, clock - self.effect_s)


def _with_nearer(times: Sequence[float], every: int) -> Iterator[float]:
    """Times of usual samples, and between each two of them those that divide their distance by ``every``."""
    for time, after in pairwise(times):
        yield from (time + (after - time) * part / every for part in range(every))
    yield from times[-1:]


def _last_looks(clock: float) -> set[float]:
    """Where looks may be lost, two of a hundred thousand ranks are not enough to see every one of them stand still."""
    return {max(0.1, clock - back) for back in (2.0, 3.0)}


def effect(timeline: Timeline) -> float:
    """When a fault begins to show (true seconds): its onset, but for a changed call whose data NCCL takes for another call's,
    the standstill.
    """
    onsets = [start for _, start in timeline.disturbance.onsets]
    if not onsets:
        return timeline.first_iteration_s
    if any(fault.kind in PROGRAM_FAULTS for fault, _ in timeline.disturbance.onsets) and timeline.hung:
        return timeline.end
    return min(onsets)


def clocks(timeline: Timeline, effect_s: float) -> list[float]:
    """Moments at which a diagnosis is asked for: before the effect, and at growing distances after it; for a clean job
    throughout.
    """
    scenario = timeline.scenario
    begin = scenario.network.init_s
    if scenario.expect.score_class is ScoreClass.CLEAN:
        last = timeline.end - 0.1
        moments = 3 if "scale" in scenario.tags else 14
        return [float(t) for t in np.linspace(begin + 1.0, last, moments)]
    before = [effect_s - b for b in BEFORE_S if effect_s - b > begin]
    after: tuple[float, ...] = AFTER_HANG_S if timeline.hung else AFTER_SLOW_S
    if "scale" in scenario.tags:
        before, after = before[-1:], AFTER_HANG_AT_SCALE_S
    ends = timeline.end if not timeline.hung else float("inf")
    return before + [effect_s + a for a in after if effect_s + a < ends]
