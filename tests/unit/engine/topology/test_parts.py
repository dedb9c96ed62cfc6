"""Parts of the inference of topology, each by itself."""

from __future__ import annotations

import numpy as np
import pytest

from ncclwatch.engine.topology.iteration import Track, find_period, occurrences
from ncclwatch.engine.topology.job_map import JobMap, KnownJob, choose_specimens
from ncclwatch.engine.topology.patterns import Call, Hints, find_passes
from ncclwatch.model.topology import Pattern, Phase, Role, Stage
from ncclwatch.simulate.scenario import Schedule
from ncclwatch.simulate.schedule import Pass, steps
from ncclwatch.text import compressed

# Tensor operations (1), exchanges (2, 3), gradients (8, 9); 7 is a barrier.
ITERATION = [2, 1, 1, 3, 1, 1] * 4 + [8, 9]
OWNER = {1: 1, 2: 2, 3: 2, 7: 4, 8: 3, 9: 3}


def period(word: list[int]) -> tuple[int, int] | None:
    """Its length, and how often it was seen in full."""
    tokens = np.array(word, np.uint64)
    found = find_period(tokens, np.array([OWNER[token] for token in word], np.int64))
    return (found[1], len(occurrences(tokens, tokens[found[0] : sum(found)]))) if found else None


def test_the_iteration_is_found_and_no_part_of_it() -> None:
    assert period(ITERATION * 3) == (len(ITERATION), 3)
    assert period(ITERATION[7:] + ITERATION * 2 + ITERATION[:5]) == (len(ITERATION), 2)
    assert period(ITERATION[:9]) is None


def test_an_evaluation_phase_or_lost_records_between_iterations_do_not_hide_it() -> None:
    evaluation = [2, 1, 1] * 4
    assert period(ITERATION * 2 + evaluation + ITERATION * 2) == (len(ITERATION), 4)
    lossy = ITERATION * 6
    del lossy[40], lossy[80]
    found = period(lossy)
    assert found is not None
    assert found[0] == len(ITERATION)


def calls_of(
    schedule: Schedule, stage: int, stages: int, micro_batches: int, chunks: int
) -> tuple[list[Call], list[Pass | None]]:
    """The calls of one iteration with two tensor operations a pass, and the pass each tensor operation belongs to."""
    calls: list[Call] = []
    truth: list[Pass | None] = []
    for number, step in enumerate(steps(schedule, stage, stages, micro_batches, chunks)):
        if isinstance(step, Pass):
            calls += [Call(1000 + 2 * number + i, inside=True) for i in range(2)]
            truth += [step, step]
            continue
        for transfer in step.transfers:
            forward = transfer.peer > stage if stages == 2 else (transfer.peer - stage) % stages == 1
            towards = 1 if forward else -1
            calls.append(Call(number, send=transfer.send, towards=towards))
            truth.append(None)
    return calls, truth


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", list(Schedule))
def test_every_pass_is_told_with_its_micro_batch_on_every_stage_of_every_schedule(schedule: Schedule, stages: int) -> None:
    chunks = 2 if schedule is Schedule.INTERLEAVED else 1
    if chunks > 1 and stages == 2:
        pytest.skip("two stages with chunks send each other everything: that cannot be told, see below")
    hints = Hints({Phase.FORWARD: 2, Phase.BACKWARD: 2}, micro_batches=2 * stages if chunks > 1 else 0, chunks=chunks)
    for stage in range(stages):
        calls, truth = calls_of(schedule, stage, stages, 2 * stages, chunks)
        found = find_passes(calls, stages, stage, hints)
        assert found.micro_batches == 2 * stages
        for place, true in zip(found.places, truth, strict=True):
            if true is not None:
                assert place.phase is (Phase.FORWARD if true.forward else Phase.BACKWARD)
                assert place.micro_batch == true.micro_batch
                assert place.chunk == (true.chunk if chunks > 1 else -1)


@pytest.mark.parametrize("schedule", [Schedule.INTERLEAVED, Schedule.ONE_F_ONE_B])
def test_an_inner_stage_alone_does_not_tell_chunks_from_micro_batches(schedule: Schedule) -> None:
    calls, truth = calls_of(schedule, 1, 4, 8, 2 if schedule is Schedule.INTERLEAVED else 1)
    found = find_passes(calls, 4, 1, Hints())
    assert found.micro_batches == 0 and {place.micro_batch for place in found.places} == {-1}
    for place, true in zip(found.places, truth, strict=True):
        assert true is None or place.phase is (Phase.FORWARD if true.forward else Phase.BACKWARD)


def test_two_stages_with_chunks_are_not_guessed_at() -> None:
    calls, _ = calls_of(Schedule.INTERLEAVED, 0, 2, 4, 2)
    found = find_passes(calls, 2, 0, Hints())
    assert {place.phase for place in found.places} == {Phase.EITHER}


def test_without_a_pipeline_gathers_and_scatters_of_context_ranks_tell_the_passes() -> None:
    forward = [Call(0, inside=True, marks=1), Call(1, inside=True)]
    backward = [Call(2, inside=True, marks=-1), Call(3, inside=True)]
    found = find_passes((forward + backward) * 3, 1, 0, Hints())
    assert found.micro_batches == 3
    phases = [place.phase for place in found.places]
    assert phases == ([Phase.FORWARD] * 2 + [Phase.BACKWARD] * 2) * 3
    silent = find_passes([Call(i, inside=True) for i in range(8)], 1, 0, Hints())
    assert {place.phase for place in silent.places} == {Phase.EITHER}
    threads = find_passes([Call(i, inside=True, thread=i // 2 % 2) for i in range(8)], 1, 0, Hints())
    assert [place.phase for place in threads.places] == phases[:8]


def track() -> Track:
    tokens = np.array(ITERATION, np.uint64)
    pattern = Pattern(0, tuple(Stage(role=Role.TENSOR) for _ in ITERATION), tokens)
    return Track(pattern)


def test_a_pointer_finds_its_place_at_an_operation_that_is_unique_and_keeps_it() -> None:
    follower = track()
    follower.follow(np.array(ITERATION[10:14], np.uint64))
    assert follower.position == -1
    follower.follow(np.array(ITERATION[14:], np.uint64))
    for position, token in [*enumerate(ITERATION)] * 2:
        follower.follow(np.array([token], np.uint64))
        assert follower.position == position


def test_a_barrier_is_passed_over_and_lost_records_lose_the_place_until_the_next_unique_operation() -> None:
    follower = track()
    follower.follow(np.array(ITERATION, np.uint64))
    follower.follow(np.array([7], np.uint64))
    assert follower.position == len(ITERATION) - 1
    follower.follow(np.array(ITERATION, np.uint64))
    assert follower.position == len(ITERATION) - 1
    follower.follow(np.array(ITERATION[:5], np.uint64))
    assert follower.position == 4
    follower.follow(np.array(ITERATION[9:20], np.uint64))
    assert follower.position == -1
    follower.follow(np.array(ITERATION[20:], np.uint64))
    assert follower.position == len(ITERATION) - 1


def test_passes_of_an_evaluation_are_not_taken_for_those_of_an_iteration() -> None:
    """Forward passes begin with a message, backward passes with the same operation as these go on with; 9 is unique."""
    message, work, last = 5, 6, 9
    word = [message, work, work] * 3 + [work, work] * 3 + [last]
    steps = tuple(Stage(role=Role.PIPELINE, towards=-1) if t == message else Stage(role=Role.TENSOR) for t in word)
    follower = Track(Pattern(0, steps, np.array(word, np.uint64)))
    follower.follow(np.array(word, np.uint64))
    evaluation, after = [message, work, work] * 3, np.array(word, np.uint64)
    follower.follow(np.array(evaluation, np.uint64))
    for end in range(3, len(after) + 3, 3):
        follower.follow(after[end - 3 : end])
        assert follower.position in (-1, min(end, len(after)) - 1), "a forward pass where a backward one is due"
    assert follower.position >= 0


def test_stages_and_rank_sets_as_text() -> None:
    assert compressed([0, 1, 2, 3, 8]) == "0-3,8"
    assert compressed([0, 4, 8, 12]) == "0-12/4"
    assert compressed([3, -1, 5]) == "3,5,1 unknown"
    stage = Stage(Phase.BACKWARD, 5, -1, 2, 1, Role.TENSOR, "AllReduce", 2)
    said = "backward of micro-batch 5, pipeline stage 2, TP rank 1: AllReduce of the tensor-parallel group, call 3 of the pass"
    assert stage.text() == said


def test_specimens_are_spread_over_all_stages_of_a_large_job() -> None:
    chosen = choose_specimens(JobMap(rank=list(range(4096))), KnownJob(4096, list(range(4096)), []))
    assert len(set(chosen)) == len(chosen) == 128
    assert {rank // 128 for rank in chosen} == set(range(32))
    assert {rank % 8 for rank in chosen} == set(range(8))
