"""Samples that were taken elsewhere (snapshots) as the batches a collector would have said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ncclwatch.collect.aggregate import Aggregator
from ncclwatch.collect.batch import NodeBatch, PlaneState
from ncclwatch.collect.ranks import ranks_of
from ncclwatch.model.state import ProcessSample


def batches_of(series: Sequence[Sequence[ProcessSample]]) -> Iterator[tuple[str, list[NodeBatch]]]:
    """(host, batches) for each host; the n-th batch holds the n-th sample of every process of it."""
    hosts: dict[str, list[Sequence[ProcessSample]]] = {}
    for samples in series:
        if samples:
            hosts.setdefault(samples[0].process.host, []).append(samples)
    for host, processes in hosts.items():
        aggregator = Aggregator(calls_plane=False)
        batches = []
        for number in range(max(map(len, processes))):
            looks = tuple(samples[min(number, len(samples) - 1)] for samples in processes)
            now_ns = max(sample.time_ns for sample in looks)
            for sample in looks:
                aggregator.add_process(sample.process, sample.time_ns)
                aggregator.feed_sample(sample)
            batches.append(
                NodeBatch(
                    host=host,
                    boot_id=looks[0].process.key.boot_id,
                    sequence=number,
                    time_ns=now_ns,
                    wall_ns=max(sample.wall_ns for sample in looks),
                    looked=True,
                    samples=tuple(part for look in looks for part in ranks_of(look)),
                    windows=aggregator.windows(now_ns),
                    planes=(PlaneState("state", True), PlaneState("calls", False, "a snapshot holds memory only")),
                )
            )
        yield host, batches
