"""Whether a job has become slow, by its iteration times: since when, how much, and when it is over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ncclwatch.collect.cadence import Iteration
from ncclwatch.engine.slow.calibration import TABLE
from ncclwatch.engine.slow.detect import (
    FEWEST_HEALTHY,
    HEALTHY_PRIOR,
    LEARNED,
    WINDOW,
    IterationWatch,
    SlowDown,
    change_point,
    log_bayes_factor,
)

BEGAN = 10.0
QUIET = [1.0, 1.01, 0.99, 1.0, 1.0, 0.98, 1.02, 1.0] * 3


def watched(durations: Sequence[float]) -> IterationWatch:
    """A watch that has seen iterations one after the other, each when it ended."""
    watch, time = IterationWatch(), BEGAN
    for number, duration in enumerate(durations):
        watch.feed([Iteration(time, time + duration, number)])
        time += duration
    return watch


def slow_down(durations: Sequence[float]) -> SlowDown | None:
    return watched(durations).slow_down()


def with_open(durations: Sequence[float], upto: float) -> IterationWatch:
    """The same with an iteration after them that has not ended."""
    watch, end = watched(durations), BEGAN + sum(durations)
    watch.feed([], Iteration(end, end + upto, len(durations)))
    return watch


def at_hand(durations: Sequence[float], upto: float) -> SlowDown | None:
    return with_open(durations, upto).slow_down()


# --- shifts --------------------------------------------------------------------------------------------------------------


def test_a_slow_down_is_repeated_and_dated() -> None:
    slow = slow_down([*QUIET, 2.0, 2.0, 2.0])
    assert slow is not None and slow.since == pytest.approx(BEGAN + sum(QUIET)) and slow.ratio == pytest.approx(1.0, abs=0.02)
    assert (slow.iterations, slow.slow) == (3, 3) and slow.lost_share == pytest.approx(0.5, abs=0.01)


def test_for_how_long_a_job_is_slow() -> None:
    assert watched(QUIET).slow_s == 0.0
    assert watched([*QUIET, 2.0, 2.0, 2.0]).slow_s == pytest.approx(6.0)
    assert with_open([*QUIET, 2.0, 2.0, 2.0], 1.5).slow_s == pytest.approx(7.5), "the iteration at hand counts"
    assert watched([*QUIET, *[2.0] * 10, *[1.0] * 15]).slow_s == 0.0


def test_a_tenth_more_in_quiet_iterations_is_slow() -> None:
    slow = slow_down([*QUIET, *[1.1] * 8])
    assert slow is not None and slow.ratio == pytest.approx(0.1, abs=0.01)
    assert slow.since == pytest.approx(BEGAN + sum(QUIET))


def test_a_change_that_is_not_worth_anybodys_time_is_none() -> None:
    assert slow_down([*QUIET, *[1.03] * 40]) is None


def test_noisy_iterations_that_are_longer_as_a_whole_are_slow() -> None:
    """Healthy ones differ by a factor of two: none of the slow ones stands out by itself, nor do many in a row."""
    chance = np.random.default_rng(7)

    def drawn(number: int, times: float) -> list[float]:
        durations: list[float] = (times * chance.uniform(0.4, 0.9, number)).tolist()
        return durations

    for _ in range(10):
        healthy = drawn(40, 1.0)
        assert slow_down(healthy) is None
        slow = slow_down([*healthy, *drawn(20, 1.7)])
        assert slow is not None and slow.slow >= 6
        assert slow.normal_s == pytest.approx(0.65, abs=0.12) and slow.since >= BEGAN + sum(healthy[:24])


def test_noise_alone_is_no_slow_down() -> None:
    chance = np.random.default_rng(7)
    found = [slow_down(chance.uniform(0.4, 0.9, 400).tolist()) for _ in range(5)]
    assert found == [None] * 5


def test_a_noisy_slow_down_ends() -> None:
    chance = np.random.default_rng(11)
    ended = 0
    for _ in range(10):
        series = np.r_[chance.uniform(0.4, 0.9, 40), 1.7 * chance.uniform(0.4, 0.9, 20)].tolist()
        assert slow_down(series) is not None
        ended += slow_down(series + chance.uniform(0.4, 0.9, 30).tolist()) is None
    assert ended >= 9, "one that is dated back into the noise before it ends later"


@pytest.mark.parametrize("noisy", [[1.0, 1.2, 0.8, 1.1, 0.9, 1.15, 0.85, 1.05, 0.95, 1.0] * 2])
def test_many_raised_in_a_row_are_slow_though_the_noise_could_explain_each(noisy: list[float]) -> None:
    slow = slow_down([*noisy, *[1.7, 1.75, 1.8] * 4])
    assert slow is not None and slow.normal_s == pytest.approx(1.0, abs=0.05) and slow.slow == 12
    assert slow.since == pytest.approx(BEGAN + sum(noisy))


def test_warm_up_is_no_slow_down() -> None:
    assert slow_down([5.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, *[1.0] * 30]) is None
    assert slow_down([1.0, 1.4, 0.8, 1.2, 0.9, 1.3, 0.7, 1.1] * 3) is None, "noisy, and as ever"


# --- single long iterations and pauses -----------------------------------------------------------------------------------


def test_one_checkpoint_is_none() -> None:
    assert slow_down([1.0] * 8 + [9.0] + [1.0] * 2) is None
    assert slow_down([*QUIET, 9.0]) is None


def test_an_iteration_far_longer_than_all_before_is_told_apart() -> None:
    """It may be a pause, so it is no slow-down yet; who is asked why says which."""
    begin = BEGAN + sum(QUIET)
    one = with_open(QUIET, 7.0).far_longer()
    assert one == SlowDown(begin, begin, float(np.mean(QUIET)), 7.0, 1, 1, alone=True)
    ended = with_open([*QUIET, 9.0], 0.2).far_longer()
    assert ended is not None and (ended.since, ended.mean_s) == (begin, 9.0), "the one at hand has just begun"
    two = with_open([*QUIET, 9.0], 7.0).far_longer()
    assert two is not None and (two.iterations, two.mean_s) == (2, 8.0)


def test_what_is_not_far_longer() -> None:
    assert with_open(QUIET, 5.0).far_longer() is None, "less than five times the longest"
    assert with_open([*QUIET, 9.0, 1.0], 0.2).far_longer() is None, "one as usual has ended since"
    assert with_open([*QUIET, 9.0, *QUIET], 30.0).far_longer() is None, "a checkpoint took a third of that"
    assert with_open(QUIET[: FEWEST_HEALTHY - 1], 9.0).far_longer() is None, "nothing is usual yet"


@pytest.mark.parametrize("apart", [
    pytest.param(20, marks=pytest.mark.xfail(reason="each costs nine iterations: taken for pauses")), 30, 50, 58,
])  # fmt: skip
def test_a_checkpoint_now_and_then_is_no_slow_down(apart: int) -> None:
    assert slow_down([*QUIET, *[9.0, *[1.0] * apart] * 4]) is None


def test_checkpoints_further_apart_are_no_slow_down() -> None:
    assert slow_down([*QUIET, *[9.0, *[1.0] * 80] * 3]) is None


def test_three_iterations_in_a_row_that_take_many_times_as_long_are_enough() -> None:
    """One event lies in two at the most: a checkpoint across the end of an iteration."""
    assert slow_down([*QUIET, 60.0, 60.0]) is None
    slow = slow_down([*QUIET, 60.0, 60.0, 60.0])
    assert slow is not None and slow.slow == 3 and slow.since == pytest.approx(BEGAN + sum(QUIET))


def test_an_iteration_at_hand_counts_by_what_it_has_taken() -> None:
    assert at_hand([*QUIET, 9.0, 9.0], 7.0) is not None
    assert at_hand([*QUIET, 9.0, 9.0], 0.9) is None, "two so far"
    assert at_hand([*QUIET, 9.0], 9.0) is None, "one event may lie in two"
    assert at_hand(QUIET, 9.0) is None, "one is a checkpoint"


@pytest.mark.parametrize("every", [2, 3, 4, 6])
def test_pauses_count_and_recovery_ends_them(every: int) -> None:
    """A garbage collector's, in iterations that take as long as each other otherwise."""
    rhythm = [*QUIET, *[*[1.0] * (every - 1), 2.5] * 8]
    slow = slow_down(rhythm)
    assert slow is not None and slow.slow == 8 and slow.iterations <= 8 * every + 1
    assert slow_down(rhythm + [1.0] * 60) is None


@pytest.mark.parametrize("every", [2, 3, 4, 6, 9])
def test_pauses_among_iterations_that_differ_a_little_count(every: int) -> None:
    """By one or two of a hundred: what was usual is spread over two bins."""
    slow = slow_down([*QUIET, *[*[1.0, 1.01, 0.99, 1.0, 1.0][: every - 1], 2.5] * 8])
    assert slow is not None and slow.slow == 8


@pytest.mark.parametrize("after", [
    [9.0, 1.0, 9.0],
    [9.0, 3.0],
])  # fmt: skip
def test_two_checkpoints_close_to_each_other_are_none(after: list[float]) -> None:
    assert slow_down([*QUIET, *after]) is None


# --- how a slow-down goes on ---------------------------------------------------------------------------------------------


def test_a_slow_down_ends() -> None:
    assert slow_down([*QUIET, *[2.0] * 10]) is not None
    watch = watched([*QUIET, *[2.0] * 10, *[1.0] * 15])
    assert watch.slow_down() is None and watch.slow is None
    assert watch.usual.mean() == pytest.approx(1.0, abs=0.02), "what was slow is not usual"


@pytest.mark.xfail(reason="it is dated back to the first of the pauses before it")
def test_a_slow_down_begins_where_it_goes_on_without_a_break() -> None:
    disturbed = [1.0] * 12 + [3.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0]
    slow = slow_down([*disturbed, *[2.0] * 8])
    assert slow is not None and slow.mean_s == pytest.approx(2.0) and (slow.iterations, slow.slow) == (8, 8)


def test_a_slow_down_that_comes_again_soon_is_the_same_one() -> None:
    """Of a proxy that sleeps now and then all is remembered; what was seen in between is no picture of it."""
    first, lull = [*QUIET, *[2.0] * 4], [1.0] * 12
    assert watched([*first, *lull]).slow is None and watched([*first, *lull]).may_go_on
    watch = watched([*first, *lull, *[2.0] * 4])
    began, again = BEGAN + sum(QUIET), BEGAN + sum(first) + sum(lull)
    assert watch.slow is not None and watch.slow.since == pytest.approx(began)
    assert watch.lull is not None and watch.lull[1] == pytest.approx(again) and began + 8.0 <= watch.lull[0] < again
    assert watch.slow.durations == pytest.approx([2.0] * 4), "how slow it is, it is now"
    slow = watch.slow_down()
    assert slow is not None and slow.newest == pytest.approx(again), "and what is lost is lost since then"


def test_a_slow_down_that_comes_much_later_is_another() -> None:
    long_ago = [*QUIET, *[2.0] * 4, *[1.0] * 2 * WINDOW]
    assert not watched(long_ago).may_go_on
    watch = watched([*long_ago, *[2.0] * 4])
    assert watch.slow is not None and watch.slow.since == pytest.approx(BEGAN + sum(long_ago)) and watch.lull is None


def test_a_slow_job_that_becomes_slower_is_judged_as_it_is_now() -> None:
    disturbed = [1.0] * 8 + [1.2, 1.3, 1.4, 1.25, 1.5] * 4
    slow = slow_down([*disturbed, 4.0, 5.0, 4.0, 4.5, 5.5])
    assert slow is not None and (slow.iterations, slow.slow) == (5, 5) and slow.normal_s == pytest.approx(1.0)
    assert slow.since == pytest.approx(BEGAN + sum(disturbed))


def test_a_slow_job_that_becomes_milder_is_judged_as_it_is_now() -> None:
    before = [*[1.0] * 8, *[10.0, 12.0, 11.0, 9.0, 12.0]]
    slow = slow_down([*before, *[1.8, 1.7, 1.9] * 5])
    assert slow is not None and slow.slow == slow.iterations and slow.normal_s == pytest.approx(1.0)
    assert slow.since == pytest.approx(BEGAN + sum(before), abs=2.0) and slow.mean_s < 2.0
    assert slow_down([*before, *[1.0] * 20]) is None, "over"


def test_what_follows_pauses_is_slow_only_if_it_is_by_itself() -> None:
    pauses = [*[0.39, 0.38, 0.39] * 4, 13.6, 17.4, 16.8]
    assert slow_down(pauses) is not None
    assert slow_down([*pauses, 2.3, 0.39, 0.38]) is None, "one of three is slow, which happens to healthy jobs"
    milder = slow_down([*pauses, *[0.8, 0.79, 0.8] * 2])
    assert milder is not None and milder.mean_s < 1.0


def test_pauses_are_no_second_slow_down() -> None:
    slow = slow_down([1.0] * 8 + [1.0, 1.0, 3.0] * 6)
    assert slow is not None and slow.slow == 6


def test_what_was_slow_before_is_not_normal() -> None:
    worse = slow_down([*[1.0, 1.01, 0.99] * 10, *[2.0] * 60, *[3.0] * 20])
    assert worse is not None and worse.normal_s == pytest.approx(1.0)
    assert worse.mean_s > 2.2


def test_a_slow_down_is_remembered_however_long_it_lasts() -> None:
    slow = slow_down([*QUIET, *[2.0] * (LEARNED + WINDOW)])
    assert slow is not None and slow.since == pytest.approx(BEGAN + sum(QUIET)) and slow.iterations <= WINDOW


def test_nothing_is_said_before_anything_is_usual() -> None:
    watch = watched([1.0] * (FEWEST_HEALTHY - 1))
    assert not watch.known and watch.limit() == float("inf") and watch.slow_down() is None
    assert watched([1.0] * FEWEST_HEALTHY).known
    assert IterationWatch().duration is None and not IterationWatch().healthy


def test_iterations_seen_before_count_once() -> None:
    watch = watched(QUIET)
    seen = list(watch.healthy)
    watch.feed(seen)
    assert list(watch.healthy) == seen and watch.healthy[0].begin == BEGAN


# --- the test itself -----------------------------------------------------------------------------------------------------


def bins(*counts: float) -> np.ndarray:
    return np.array(counts)


NOTHING = np.zeros(len(HEALTHY_PRIOR))
USUAL = bins(20, 18, 2, 0)


def test_the_bayes_factor_of_no_data_is_one() -> None:
    assert log_bayes_factor(USUAL, NOTHING) == pytest.approx(0.0, abs=1e-9)


def test_the_bayes_factor_of_one_iteration_is_the_ratio_of_its_two_predictions() -> None:
    """By hand: after USUAL and its prior an iteration in the last bin has the probability of its pseudo-count. Of their own, all
    changed:
    2 of 3.5; some changed: half of them slow, and of those 2 of 2.5. The mean of the two."""
    healthy = HEALTHY_PRIOR[-1] / (USUAL.sum() + HEALTHY_PRIOR.sum())
    changed = (2 / 3.5 + 1 / 2 * 2 / 2.5) / 2
    assert log_bayes_factor(USUAL, bins(0, 0, 0, 1)) == pytest.approx(np.log(changed / healthy))


def test_evidence_grows_with_slow_iterations_and_falls_with_normal_ones() -> None:
    shifted = [log_bayes_factor(USUAL, bins(0, 0, 0, number)) for number in range(1, 8)]
    assert np.all(np.diff(shifted) > 0)
    normal = [log_bayes_factor(USUAL, bins(number, number, 0, 0)) for number in range(1, 8)]
    assert max(normal) < 0.1, "iterations as ever are no evidence, however many"
    paused = log_bayes_factor(USUAL, bins(12, 9, 0, 14))
    assert paused > TABLE.change_log_bayes_factor > log_bayes_factor(USUAL, bins(12, 9, 0, 1))


def test_what_was_often_so_before_is_no_change() -> None:
    paused_before = bins(12, 12, 0, 8)
    assert log_bayes_factor(paused_before, bins(6, 6, 0, 4)) < 0


def test_the_change_point_is_where_it_was_made() -> None:
    for before in (10, 30, 100):
        series = np.r_[np.tile([1.0, 1.01, 0.99, 1.0, 0.98], before // 5), np.full(12, 1.6)]
        assert change_point(series) == before
    assert change_point(np.tile([1.0, 1.01, 0.99], 30)) is None
    assert change_point(np.r_[np.ones(30), np.full(12, 0.5)]) is None, "faster is no slow-down"


def test_a_change_point_takes_a_ratio_of_means() -> None:
    series = np.r_[np.tile([1.0, 1.01, 0.99, 1.0, 0.98], 6), np.full(20, 1.3)]
    assert change_point(series) == 30 and change_point(series, 1.5) is None


def test_the_unit_of_time_is_of_no_matter() -> None:
    series = [*QUIET, *[1.0, 1.0, 2.5] * 5]
    one, thousand = slow_down(series), slow_down([1000 * duration for duration in series])
    assert one is not None and thousand is not None
    assert (one.iterations, one.slow) == (thousand.iterations, thousand.slow) and one.ratio == pytest.approx(thousand.ratio)
