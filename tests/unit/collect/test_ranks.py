"""Processes that drive several GPUs: what is read of one is told as one rank a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ncclwatch.collect.aggregate import Aggregator
from ncclwatch.collect.ranks import ranks_of, series_of
from ncclwatch.collect.series import batches_of
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.device import ConnectionCounter, DeviceCommunicator, DeviceSample, UnfinishedTransfer
from ncclwatch.model.events import EVENT_DTYPE, Function, Kind
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.view.states import Accused, letter
from unit.synthetic import SECOND, WORLD, Rank, frozen_ring, process

GPUS = 2


def address(rank: int) -> int:
    return 0x7000_0000 + 0x100_0000 * rank


def in_one_process(ranks: Sequence[Rank]) -> list[ProcessSample]:
    """What is read of one process that drives the GPUs of all these ranks."""
    looks = [rank.looks(2) for rank in ranks]
    merged = []
    for look in zip(*looks, strict=True):
        first = look[0].process
        merged.append(
            replace(
                look[0],
                # The environment counts processes, not GPUs.
                process=replace(first, key=replace(first.key, pid=500 + first.rank), host="node0", rank=first.rank, world_size=2)
                if first.rank is not None
                else first,
                communicators=tuple(
                    replace(c, address=address(rank.rank), device=i)
                    for i, (rank, sample) in enumerate(zip(ranks, look, strict=True))
                    for c in sample.communicators
                ),
                operations=tuple(
                    replace(o, comm_address=address(rank.rank), address=o.address + 0x10_0000 * rank.rank)
                    for rank, sample in zip(ranks, look, strict=True)
                    for o in sample.operations
                ),
                run_state="S",
            )
        )
    return merged


def job(victim: int, world: int = 4) -> list[list[ProcessSample]]:
    """Two processes of two GPUs each; one GPU's rank has nothing open for what the others wait in."""
    ranks = frozen_ring(victim, world, run_state="S")
    ranks[victim].operations = ()
    return [in_one_process(ranks[i : i + GPUS]) for i in range(0, world, GPUS)]


def test_a_sample_of_one_gpu_is_left_as_it_is() -> None:
    [sample] = frozen_ring(2)[0].looks(1)
    assert ranks_of(sample) == (sample,)
    assert ranks_of(sample)[0] is sample
    assert ranks_of(replace(sample, communicators=())) == (replace(sample, communicators=()),)


def test_every_gpu_gets_its_communicators_and_operations_and_none_is_lost() -> None:
    for sample in (look for series in job(2) for look in series):
        parts = ranks_of(sample)
        assert [part.process.key.part for part in parts] == [0, 1]
        assert [part.process.pid for part in parts] == [sample.process.pid] * 2
        assert parts[0].process.key == sample.process.key
        assert [len(part.communicators) for part in parts] == [1, 1]
        for part in parts:
            assert part.process.rank is None
            assert part.rank == part.communicators[0].rank
            assert {o.comm_address for o in part.operations} <= {part.communicators[0].address}
        assert sorted(o.address for part in parts for o in part.operations) == sorted(o.address for o in sample.operations)


def test_what_cannot_be_told_to_a_gpu_is_kept_once() -> None:
    sample = job(2)[0][0]
    first, *rest = sample.operations
    nobody = replace(first, comm_address=0, comm_hash=0)
    parts = ranks_of(replace(sample, operations=(nobody, *rest)))
    assert [nobody in part.operations for part in parts] == [True, False]


def test_the_frozen_gpu_of_a_process_is_named_and_not_its_neighbour() -> None:
    for victim in range(4):
        series = [part for samples in job(victim) for part in series_of(samples)]
        verdict = diagnose(series)
        assert verdict.verdict_class.accuses
        assert [(c.rank, c.pid, c.gpu) for c in verdict.culprits] == [(victim, 500 + victim // GPUS * GPUS, victim % GPUS)]
        assert set(verdict.victims) == set(range(4)) - {victim}
        accused = Accused.by([verdict])
        [(_, batches)] = batches_of(job(victim))
        windows = batches[-1].windows
        assert {window.rank for window in windows if letter(window, accused) == "X"} == {victim}


def test_windows_are_by_rank_and_calls_find_theirs() -> None:
    samples = job(2)
    aggregator = Aggregator()
    for [look, _] in samples:
        aggregator.add_process(look.process, look.time_ns)
        aggregator.feed_sample(look)
    pid = samples[1][0].process.pid
    events = np.zeros(4, EVENT_DTYPE)
    events["pid"], events["tid"], events["kind"], events["time_ns"] = pid, pid, Kind.ENTER, samples[1][0].time_ns
    events["function"] = (Function.GROUP_START, Function.ALL_REDUCE, Function.ALL_REDUCE, Function.GROUP_END)
    events["comm"] = (0, address(2), address(3), 0)
    events["comm_hash"], events["count"], events["nranks"], events["datatype"] = WORLD, 10, 4, 7
    aggregator.feed_events(events)
    windows = aggregator.windows(samples[1][0].time_ns + 2 * SECOND)
    assert [(w.rank, w.gpu, w.operations) for w in windows] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert len({window.process.key for window in windows}) == 4
    aggregator.feed_problem(samples[1][0].process.key, "not now")
    assert [bool(w.problem) for w in aggregator.windows(0)] == [False, False, True, True]
    # One GPU's communicator is destroyed; then the process ends.
    left = replace(samples[1][1], communicators=samples[1][1].communicators[:1])
    aggregator.feed_sample(left)
    assert len(aggregator) == 3
    aggregator.remove_process(left.process.key)
    assert len(aggregator) == 2


def test_ranks_of_a_process_are_told_apart_by_agents_too() -> None:
    [(_, [batch, _])] = batches_of(job(1))
    writer, reader = BatchWriter(), BatchReader()
    heard = reader.decode(writer.encode(batch)).batch
    assert [s.process.key for s in heard.samples] == [s.process.key for s in batch.samples]
    assert [w.process.key for w in heard.windows] == [w.process.key for w in batch.windows]
    assert len({s.process.key for s in heard.samples}) == 4


def test_the_shim_s_counters_go_to_the_gpu_they_are_of() -> None:
    sample = job(2)[0][0]
    told = DeviceSample(
        entry="plugin",
        interface=4,
        sampler="on",
        communicators=(
            DeviceCommunicator(WORLD, 0, 1, 4, False, 1, 1, 0),
            # The interface told neither hash nor rank: its address lies in the communicator of rank 0.
            DeviceCommunicator(None, address(0) + 0x40, None, None, False, 1, 1, 0),
        ),
        transfers=(UnfinishedTransfer(WORLD, 1, 0, 2, True, 8, 1, 0, 4096, 0, 0),),
        counters=(
            ConnectionCounter(address(0), 0, 1, True, 0, "head", 3),
            ConnectionCounter(address(1), 0, 0, False, 0, "tail", 4),
        ),
    )
    first, second = (part.device for part in ranks_of(replace(sample, device=told)))
    assert first is not None
    assert second is not None
    assert [c.inside_address for c in first.communicators] == [address(0) + 0x40]
    assert [c.rank for c in second.communicators] == [1]
    assert (len(first.transfers), len(second.transfers)) == (0, 1)
    assert ([c.value for c in first.counters], [c.value for c in second.counters]) == ([3], [4])


def test_the_verdict_says_which_gpu() -> None:
    verdict = diagnose([part for samples in job(3) for part in series_of(samples)])
    assert verdict.verdict_class is not VerdictClass.UNKNOWN
    assert "rank 3" in verdict.summary
    assert "GPU 1" in verdict.summary
    assert json.loads(json.dumps(verdict.to_json()))["culprits"][0]["gpu"] == 1


def test_a_stopped_process_is_all_its_ranks() -> None:
    stopped = [[replace(look, run_state="T") for look in series] if i else series for i, series in enumerate(job(2))]
    verdict = diagnose([part for samples in stopped for part in series_of(samples)])
    assert verdict.verdict_class is VerdictClass.STOPPED
    assert {c.rank for c in verdict.culprits} <= {2, 3}
    assert {c.pid for c in verdict.culprits} == {process(2, 4).pid - 500}
