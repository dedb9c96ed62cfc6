"""Batches of a made-up node, as a collector would say them: for tests of recordings, replay and reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ncclwatch.collect.aggregate import Aggregator
from ncclwatch.collect.batch import NodeBatch, Overhead, PlaneState
from ncclwatch.model.state import ProcessSample
from unit.synthetic import SECOND, frozen_ring

WALL = 1_700_000_000 * SECOND


def ring_looks(count: int, *, world: int = 4, stuck_from: int | None = None, victim: int = 2) -> Iterator[list[ProcessSample]]:
    """A ring AllReduce, a look a second: operations go by, and from ``stuck_from`` on one rank is stopped in the middle."""
    for look in range(count):
        stuck = stuck_from is not None and look >= stuck_from
        number = min(look, stuck_from) if stuck_from is not None else look
        samples = []
        # While all is well everybody is the last one in turn.
        for rank in frozen_ring(victim if stuck else look % world, world, run_state="T" if stuck else "S"):
            [sample] = rank.looks(1)
            operations = tuple(replace(o, op_count=o.op_count + 2 * number) for o in sample.operations)
            now, wall = (100 + look) * SECOND, WALL + look * SECOND
            samples.append(replace(sample, operations=operations, time_ns=now, wall_ns=wall))
        yield samples


def node_batches(looks: Sequence[list[ProcessSample]], *, hosts: Sequence[str] = ()) -> Iterator[NodeBatch]:
    """One batch a look, of the processes on ``hosts`` (all of them by default)."""
    aggregator = Aggregator(calls_plane=False)
    for number, samples in enumerate(looks):
        ours = tuple(sample for sample in samples if not hosts or sample.process.host in hosts)
        for sample in ours:
            aggregator.add_process(sample.process, sample.time_ns)
            aggregator.feed_sample(sample)
        yield NodeBatch(
            host=hosts[0] if hosts else "node0",
            boot_id="boot",
            sequence=number,
            time_ns=samples[0].time_ns,
            wall_ns=samples[0].wall_ns,
            looked=True,
            samples=ours,
            windows=aggregator.windows(samples[0].time_ns),
            planes=(PlaneState("state", True), PlaneState("calls", False, "switched off")),
            overhead=Overhead(None, None, 0.002, 70 << 20),
        )
