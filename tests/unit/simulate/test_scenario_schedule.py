"""Schedules against what Megatron-LM's functions do: warm-up depth, order of passes, and that sends and receives of all stages
fit together.
"""

from __future__ import annotations

from collections import defaultdict, deque

import pytest

from ncclwatch.simulate.scenario import Schedule
from ncclwatch.simulate.schedule import Pass, passes, steps, warmup_depth

CONFIGURATIONS = [
    (Schedule.GPIPE, 1, 3, 1),
    (Schedule.GPIPE, 4, 6, 1),
    (Schedule.ONE_F_ONE_B, 1, 4, 1),
    (Schedule.ONE_F_ONE_B, 2, 4, 1),
    (Schedule.ONE_F_ONE_B, 4, 3, 1),
    (Schedule.ONE_F_ONE_B, 4, 16, 1),
    (Schedule.INTERLEAVED, 2, 2, 2),
    (Schedule.INTERLEAVED, 2, 8, 3),
    (Schedule.INTERLEAVED, 4, 4, 2),
    (Schedule.INTERLEAVED, 4, 12, 3),
]


def _text(items: list[Pass]) -> str:
    return " ".join(f"{'F' if p.forward else 'B'}{p.micro_batch}" + (f".{p.chunk}" if p.chunk else "") for p in items)


def test_one_f_one_b_of_four_stages() -> None:
    """The order of Megatron's forward_backward_pipelining_without_interleaving for 5 micro-batches."""
    assert _text(passes(Schedule.ONE_F_ONE_B, 0, 4, 5)) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert _text(passes(Schedule.ONE_F_ONE_B, 2, 4, 5)) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert _text(passes(Schedule.ONE_F_ONE_B, 3, 4, 5)) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


def test_gpipe_does_all_forward_passes_first() -> None:
    assert _text(passes(Schedule.GPIPE, 1, 2, 3)) == "F0 F1 F2 B0 B1 B2"


def test_interleaved_of_two_stages_and_two_chunks() -> None:
    """Schedule table of PP2, 4 micro-batches, 2 chunks: 0 1 0 1 2 3 2 3 with chunks 0 0 1 1 0 0 1 1; last chunk first going
    back.
    """
    assert warmup_depth(0, 2, 4, 2) == 4
    assert warmup_depth(1, 2, 4, 2) == 2
    expected = "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3"
    assert _text(passes(Schedule.INTERLEAVED, 0, 2, 4, 2)) == expected
    expected = "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"
    assert _text(passes(Schedule.INTERLEAVED, 1, 2, 4, 2)) == expected


@pytest.mark.parametrize(("schedule", "stages", "micro_batches", "chunks"), CONFIGURATIONS)
def test_every_stage_does_every_pass_once(schedule: Schedule, stages: int, micro_batches: int, chunks: int) -> None:
    for stage in range(stages):
        done = passes(schedule, stage, stages, micro_batches, chunks)
        assert len(done) == len(set(done)) == 2 * micro_batches * chunks
        for p in done:
            if not p.forward:
                assert done.index(Pass(True, p.micro_batch, p.chunk)) < done.index(p)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(("schedule", "stages", "micro_batches", "chunks"), CONFIGURATIONS)
def test_exchanges_of_all_stages_fit_and_carry_the_right_tensor(
    schedule: Schedule, stages: int, micro_batches: int, chunks: int, forward_only: bool
) -> None:
    """Run the stages against each other with blocking rendezvous: no deadlock, and every pass finds the input of its own
    micro-batch.
    """
    programs = [steps(schedule, s, stages, micro_batches, chunks, forward_only=forward_only) for s in range(stages)]
    cursor = [0] * stages
    offered: dict[tuple[int, int, bool], deque[Pass]] = defaultdict(deque)
    outbox: list[dict[bool, deque[Pass]]] = [{True: deque(), False: deque()} for _ in range(stages)]
    inbox: list[set[Pass]] = [set() for _ in range(stages)]
    sent = [False] * stages
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while cursor[stage] < len(programs[stage]):
                step = programs[stage][cursor[stage]]
                if isinstance(step, Pass):
                    _check_input(step, stage, stages, chunks, inbox[stage])
                    _produce(step, stage, stages, chunks, outbox[stage])
                else:
                    if not sent[stage]:
                        for t in step.transfers:
                            if t.send:
                                offered[stage, t.peer, t.forward].append(outbox[stage][t.forward].popleft())
                        sent[stage] = True
                    wanted = [(t.peer, stage, t.forward) for t in step.transfers if not t.send]
                    if any(not offered[key] for key in wanted):
                        break
                    inbox[stage] |= {offered[key].popleft() for key in wanted}
                    sent[stage] = False
                cursor[stage] += 1
                moved = True
    assert cursor == [len(p) for p in programs]
    assert not any(offered.values())


def _check_input(step: Pass, stage: int, stages: int, chunks: int, inbox: set[Pass]) -> None:
    source = not (stage == 0 and step.chunk == 0) if step.forward else not (stage == stages - 1 and step.chunk == chunks - 1)
    if source:
        assert step in inbox, f"stage {stage} has no input for {step}"
        inbox.remove(step)


def _produce(step: Pass, stage: int, stages: int, chunks: int, outbox: dict[bool, deque[Pass]]) -> None:
    """What the pass hands on is named by the pass that takes it."""
    if step.forward:
        if stage < stages - 1:
            outbox[True].append(step)
        elif step.chunk < chunks - 1:
            outbox[True].append(step._replace(chunk=step.chunk + 1))
    elif stage > 0:
        outbox[False].append(step)
    elif step.chunk > 0:
        outbox[False].append(step._replace(chunk=step.chunk - 1))
