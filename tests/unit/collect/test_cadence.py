"""Iterations from calls, and their order."""

from __future__ import annotations

import numpy as np
import pytest

from ncclwatch.collect.cadence import FEWEST_CALLS, Cadences
from ncclwatch.collect.call_order import MOST_CALLS, UNMADE_RECORDS
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind

TENSOR, DATA, PIPE = 0x1000, 0x2000, 0x3000


def calls(program: list[tuple[Function, int, int]], times: list[float], pid: int = 7) -> np.ndarray:
    """Call records: (function, communicator, peer) at times in seconds."""
    events = np.zeros(len(program), EVENT_DTYPE)
    for event, (function, comm, peer), time in zip(events, program, times, strict=True):
        event["function"], event["comm"], event["peer"] = function, comm, peer
        event["time_ns"], event["pid"], event["tid"] = round(time * 1e9), pid, pid
    events["kind"], events["flags"], events["count"] = Kind.ENTER, Flag.COMM_READ, 64
    return events


def iteration(begin: float, work: float, micro_batches: int = 4) -> tuple[list[tuple[Function, int, int]], list[float]]:
    """Some tensor-parallel calls, ``work`` seconds apart, and the gradients."""
    program = [(Function.ALL_REDUCE, TENSOR, -1)] * (4 * micro_batches)
    program += [(Function.REDUCE_SCATTER, DATA, -1), (Function.ALL_GATHER, DATA, -1)]
    return program, [begin + work * k for k in range(len(program))]


def feed(cadences: Cadences, plan: list[tuple[str, float]]) -> float:
    """Iterations of some work a call, evaluation phases and pauses, in batches as they would come; returns the end."""
    time = 100.0
    for what, value in plan:
        if what == "pause":
            time += value
            continue
        program, times = iteration(time, value)
        if what == "evaluation":
            program, times = program[:8], times[:8]
        time = times[-1] + value
        for half in (slice(None, 7), slice(7, None)):
            cadences.add_calls(calls(program[half], times[half]))
    return time


class TestCadence:
    def test_layers_that_call_for_long_before_the_gradients_are_no_iterations(self) -> None:
        """72 tensor-parallel calls come before the first call on the gradients: their beat is found first, and given up."""
        cadences, time = Cadences(), 100.0
        for _ in range(6):
            program, times = iteration(time, 0.003, micro_batches=18)
            time = times[-1] + 0.1
            for start in range(0, len(program), 20):
                cadences.add_calls(calls(program[start : start + 20], times[start : start + 20]))
        found = cadences.of["", 7]
        assert found.period.length == 74
        assert [i.duration for i in found.iterations] == pytest.approx([0.1 + 73 * 0.003] * len(found.iterations))
        assert len(found.iterations) >= 3

    def test_an_iteration_begins_where_its_calls_do_once_its_end_has_come_often_enough(self) -> None:
        """Amid the third iteration a run of its calls has come three times, and the gradients that end it only twice."""
        cadences, time, begins = Cadences(), 100.0, []
        for _ in range(8):
            program = [(Function.ALL_REDUCE, TENSOR, -1)] * 4
            for sends, layers in ((True, 3), (False, 8), (True, 8), (False, 4)):
                program += [(Function.SEND if sends else Function.RECV, PIPE, 1)] + [(Function.ALL_REDUCE, TENSOR, -1)] * layers
            program += [(Function.REDUCE_SCATTER, DATA, -1), (Function.ALL_GATHER, DATA, -1)]
            # Four calls are made ahead; then the host waits for the GPU, longer than between iterations.
            times = [time + 0.001 * at + (0.3 if at >= 4 else 0.0) for at in range(len(program))]
            begins.append(time)
            for start in range(0, len(program), 5):
                cadences.add_calls(calls(program[start : start + 5], times[start : start + 5]))
            time = times[-1] + 0.1
        found = cadences.of["", 7]
        # What was called before the place of the end was known is cut by it as well.
        assert [i.begin for i in found.iterations] == pytest.approx(begins[-1 - len(found.iterations) : -1])
        assert len(found.iterations) >= 5 and found.period.whole

    def test_iterations_are_found_and_look_alikes_left_out(self) -> None:
        cadences = Cadences()
        plan = (
            [("train", 0.01)] * 6 + [("evaluation", 0.01)] * 2 + [("train", 0.01)] * 3 + [("pause", 5.0)] + [("train", 0.01)] * 3
        )
        feed(cadences, plan)
        found = cadences.of.find("anywhere", 7)
        assert found is not None and found.period.length == 18
        durations = [i.duration for i in found.iterations]
        assert np.median(durations) == pytest.approx(0.18, rel=0.01)
        assert sum(d > 1 for d in durations) <= 1, "a pause is one long iteration, an evaluation is none"

    def test_calls_one_like_another_in_quick_succession_are_a_beat(self) -> None:
        """Tensor parallelism alone: nothing tells where an iteration ends, and a backward pass is no slow forward pass."""
        cadences = Cadences()
        for step, begin in ((0.01, 100.0), (0.02, 101.0), (0.2, 103.0)):
            times = [begin + step * k for k in range(60)]
            cadences.add_calls(calls([(Function.ALL_REDUCE, TENSOR, -1)] * 60, times))
            assert cadences.of["", 7].is_inner(begin + step * 60) == (step < 0.1)

    def test_a_host_that_calls_a_whole_iteration_at_once_and_then_waits_shows_no_iteration_times(self) -> None:
        """Sequence parallelism: two calls come back 72 times within a moment, one on the loss follows, and then the GPU works."""
        cadences, inner = Cadences(), list[tuple[int, bool]]()
        program = [(Function.ALL_GATHER, TENSOR, -1), (Function.REDUCE_SCATTER, TENSOR, -1)] * 72 + [
            (Function.ALL_REDUCE, DATA, -1)
        ]
        for begin in (100.0, 107.0, 114.0, 121.0, 128.0):
            cadences.add_calls(calls(program, [begin + 3e-5 * at for at in range(len(program))]))
            found = cadences.of["", 7]
            inner.append((found.period.length, found.is_inner(begin + 5.0)))
        assert inner[0] == (2, True) and inner[-1] == (145, False)
        assert [i.duration for i in found.iterations] == pytest.approx([7.0] * len(found.iterations), rel=0.01)

    def test_micro_batches_that_a_host_calls_at_once_show_no_iteration_times(self) -> None:
        """Three of them within a moment, one like another, and then the GPU works."""
        cadences = Cadences()
        micro_batch = [(Function.RECV, DATA, 0), (Function.ALL_REDUCE, TENSOR, -1), (Function.SEND, DATA, 0)]
        for number in range(12):
            times = [100.0 + 14.0 * number + 3e-5 * at for at in range(9)]
            cadences.add_calls(calls(micro_batch * 3, times))
        found = cadences.of["", 7]
        assert found.period.length == 3 and max(one.duration for one in found.iterations) > 13.0
        assert found.is_inner(268.0) and found.whole_program(268.0) == 0

    @pytest.mark.parametrize("pause_s", [1.0, 5.0])
    def test_a_job_that_pauses_now_and_then_shows_iteration_times(self, pause_s: float) -> None:
        cadences, time, times = Cadences(), 100.0, list[float]()
        for number in range(80):
            times += [time + 0.01 * at for at in range(3)]
            time += 0.25 + pause_s * (number % 4 == 3)
        cadences.add_calls(
            calls([(Function.RECV, DATA, 0), (Function.ALL_REDUCE, DATA, -1), (Function.SEND, DATA, 0)] * 80, times)
        )
        found = cadences.of["", 7]
        assert found.period.length == 3 and not found.is_inner(time)

    def test_micro_batches_are_no_iterations_however_long_they_take(self) -> None:
        """Sixteen micro-batches of half a second, one like another, and then the gradients: so it goes on."""
        cadences, time = Cadences(), 100.0
        for _ in range(6):
            program, times = iteration(time, 0.12, micro_batches=16)
            cadences.add_calls(calls(program, times))
            time = times[-1] + 0.12
        assert cadences.of["", 7].period.length == 66

    def test_calls_of_layers_between_long_ones_are_a_beat_too(self) -> None:
        """Two layers of each of two micro-batches: of the time between single calls every second is that of a pass."""
        times = [100.0 + 0.58 * (k // 2) + 0.08 * (k % 2) for k in range(61)]
        for newest in (60, 61):
            cadences = Cadences()
            cadences.add_calls(calls([(Function.ALL_REDUCE, TENSOR, -1)] * newest, times[:newest]))
            assert cadences.of["", 7].is_inner(times[newest - 1])

    def test_an_inner_loop_is_not_taken_for_an_iteration(self) -> None:
        cadences = Cadences()
        feed(cadences, [("train", 0.01)] * 12)
        found = cadences.of.find("", 7)
        assert found is not None and found.period.length == 18 and len(found.iterations) >= 8

    @pytest.mark.parametrize("micro_batches", [2, 4, 8])
    @pytest.mark.parametrize("batch", [5, 64])
    def test_an_iteration_that_ends_by_nothing_but_a_change_of_direction(self, micro_batches: int, batch: int) -> None:
        """GPipe without data parallelism: no operation comes once an iteration, and sends come regularly for a while."""
        tensor = (Function.ALL_REDUCE, TENSOR, -1)
        forward, backward = [tensor, tensor, (Function.SEND, PIPE, 1)], [(Function.RECV, PIPE, 1), tensor, tensor]
        program = (forward * micro_batches + backward * micro_batches) * 40
        cadences, usual = Cadences(), 6 * micro_batches
        times = [100.0 + 0.01 * k for k in range(len(program))]
        for start in range(0, len(program), batch):
            cadences.add_calls(calls(program[start : start + batch], times[start : start + batch]))
        found = cadences.of["", 7]
        assert found.period.length == usual and found.generation <= 3
        assert len(found.iterations) >= 12
        assert [i.duration for i in found.iterations] == pytest.approx([0.01 * usual] * len(found.iterations))
        assert {len(profile) for profile in found.profiles} == {usual + 1} and found.open_since is not None

    def test_lost_records_cut_the_iteration(self) -> None:
        cadences = Cadences()
        end = feed(cadences, [("train", 0.01)] * 8)
        before = len(cadences.of["", 7].iterations)
        program, times = iteration(end, 0.01)
        cadences.add_calls(calls(program[10:], times[10:]), lost=8)
        assert len(cadences.of["", 7].iterations) == before

    def test_a_batch_of_which_records_are_missing_says_nothing_and_is_held_against_nobody(self) -> None:
        cadences = Cadences()
        end = feed(cadences, [("train", 0.01)] * 40)
        found, before, known = cadences.of["", 7], cadences.orders["", 7], len(cadences.of["", 7].iterations)
        program, times = iteration(end, 0.01)
        del program[5], times[5]  # the one that was lost: of the others it is not known that they follow each other
        cadences.add_calls(calls(program * 20, [at + 0.18 * turn for turn in range(20) for at in times]), lost=1)
        assert cadences.orders.find("", 7) is None and len(before.calls) > 0
        end += 100.0  # and for long nothing came through
        assert not found.is_inner(end), "how long that took is not known to be outside of iterations"
        program, times = iteration(end, 0.01)
        cadences.add_calls(calls(program * 3, [at + 0.18 * turn for turn in range(3) for at in times]))
        assert cadences.orders["", 7].calls[0].time_ns == round(end * 1e9)
        assert len(found.iterations) == known + 1 and found.iterations[-1].duration == pytest.approx(0.18)
        assert not found.is_inner(end + 0.54)

    def test_a_pattern_that_changes_for_good_is_given_up_for_the_new_one(self) -> None:
        cadences = Cadences()
        end = feed(cadences, [("train", 0.01)] * 20)
        found, first = cadences.of["", 7], cadences.of["", 7].generation
        assert found.period.length == 18
        program = [(Function.ALL_REDUCE, TENSOR, -1)] * 4 + [(Function.ALL_GATHER, DATA, -1)]
        for _ in range(60):
            cadences.add_calls(calls(program, [end + 0.05 * k for k in range(5)]))
            end += 0.25
        assert found.period.length == 5 and found.generation > first
        assert [i.duration for i in found.iterations] == pytest.approx([0.25] * len(found.iterations))

    def test_launches_of_graphs_whose_calls_nobody_saw_are_calls_each_of_its_graph(self) -> None:
        """Three graphs an iteration. A launch whose calls are known is none, nor is any once NCCL is called."""
        cadences = Cadences()
        graphs = [(Function.GRAPH_LAUNCH, 0x9000 + number % 3, 0) for number in range(36)]
        events = calls(graphs, [0.2 * number for number in range(36)])
        events["flags"] = Flag.UNKNOWN_GRAPH
        known = calls(graphs, [0.2 * number + 0.1 for number in range(36)])
        known["flags"] = 0
        cadences.add_calls(np.sort(np.concatenate([events, known]), order="time_ns"))
        found = cadences.of["", 7]
        assert found.period.length == 3 and not found.is_inner(7.2)
        assert [one.duration for one in found.iterations] == pytest.approx([0.6] * len(found.iterations))
        assert not cadences.orders["", 7].calls, "what they hold is not known"
        plain = [(Function.ALL_REDUCE, TENSOR, -1), (Function.ALL_GATHER, DATA, -1)] * 9
        cadences.add_calls(calls(plain, [8.0 + 0.3 * number for number in range(18)]))
        launches = calls(graphs[:5], [13.4 + 0.01 * number for number in range(5)])
        launches["flags"] = Flag.UNKNOWN_GRAPH
        cadences.add_calls(launches)
        assert cadences.of["", 7].period.length == 2, "who calls NCCL itself is timed by that"

    def test_a_process_that_is_gone_is_forgotten(self) -> None:
        cadences = Cadences()
        feed(cadences, [("train", 0.01)] * 4)
        cadences.forget("host", 8)
        assert cadences.of.find("host", 7) is not None and cadences.orders.find("host", 7) is not None
        cadences.forget("host", 7)
        assert cadences.of.find("host", 7) is None and cadences.orders.find("host", 7) is None

    def test_order_of_calls_places_open_operations(self) -> None:
        cadences = Cadences()
        group = [(Function.GROUP_START, 0, -1), (Function.SEND, PIPE, 1), (Function.RECV, PIPE, 1), (Function.GROUP_END, 0, -1)]
        program = [(Function.RECV, PIPE, 0), (Function.ALL_REDUCE, TENSOR, -1), *group, (Function.ALL_REDUCE, TENSOR, -1)]
        cadences.add_calls(calls(program, [1.0 + 0.1 * k for k in range(len(program))]))
        order = cadences.orders.find("", 7)
        assert order is not None
        open_now = {(PIPE, (False, 0)): {3}, (TENSOR, None): {6, 4}, (PIPE, (True, 1)): {5}, (PIPE, (False, 1)): {5}}
        places = order.locate(open_now, 3_000_000_000)
        assert places is not None
        assert places[(PIPE, (False, 0)), 3] == -3 and [places[(TENSOR, None), number] for number in (4, 6)] == [-2, 0]
        assert places[(PIPE, (True, 1)), 5] == places[(PIPE, (False, 1)), 5] == -1, "one group call is one operation"
        assert order.locate({(TENSOR, None): {2, 4, 6}}, 3_000_000_000) is None, "a call that is not kept cannot be placed"

    def test_a_group_may_lie_in_two_batches_and_hold_groups(self) -> None:
        start, end = (Function.GROUP_START, 0, -1), (Function.GROUP_END, 0, -1)
        send, recv, one = (Function.SEND, PIPE, 1), (Function.RECV, PIPE, 1), (Function.ALL_REDUCE, TENSOR, -1)
        program = [one, start, start, send, end, start, recv, end, end, send, recv]
        for cut in range(len(program) + 1):
            cadences = Cadences()
            for part, begin in ((program[:cut], 0), (program[cut:], cut)):
                cadences.add_calls(calls(part, [1.0 + 0.1 * (begin + k) for k in range(len(part))]))
            order = cadences.orders.find("", 7)
            assert order is not None
            ways = [call.ways for call in order.calls]
            assert ways == [[None], [(True, 1), (False, 1)], [(True, 1)], [(False, 1)]], cut

    def test_calls_of_which_nobody_asks_are_bounded(self) -> None:
        cadences = Cadences()
        for turn in range(80):
            program = [(Function.ALL_REDUCE, TENSOR, -1), (Function.SEND, PIPE, turn)] * 20
            cadences.add_calls(calls(program, [turn + 0.01 * k for k in range(len(program))]))
        order = cadences.orders.find("", 7)
        assert order is not None and len(order._unmade) <= UNMADE_RECORDS
        assert len(order.calls) == MOST_CALLS
        assert [call.ways for call in order.calls][-2:] == [[None], [(True, 79)]]

    def test_the_more_processes_the_fewer_calls_of_each(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ncclwatch.collect.cadence.ALL_CALLS", 1000)
        cadences = Cadences()
        for turn in range(30):
            for host in "abcde" if turn else "a":
                cadences.add_calls(
                    calls([(Function.ALL_REDUCE, TENSOR, -1)] * 40, [turn + 0.01 * k for k in range(40)]), source=host
                )
        assert {len(order.calls) for order in cadences.orders.values()} == {200}
        monkeypatch.setattr("ncclwatch.collect.cadence.ALL_CALLS", 10)
        cadences.add_calls(calls([(Function.ALL_REDUCE, TENSOR, -1)] * 40, [90 + 0.01 * k for k in range(40)]), source="f")
        assert len(cadences.orders["f", 7].calls) == 40 and len(cadences.orders["a", 7].calls) == 200, (
            "it shrinks when there are new ones"
        )
        cadences.add_calls(calls([(Function.ALL_REDUCE, TENSOR, -1)], [99.0]), source="a")
        assert len(cadences.orders["a", 7].calls) == FEWEST_CALLS
