"""Flows of jobs as arrays: between which NICs, for which job and ring, how many bytes beside the others of its job.

A ring AllReduce on n hosts sends from each host to the next, on every channel; all queue pairs of a connection carry equal
parts, whether NCCL splits each message over them (``NCCL_IB_SPLIT_DATA_ON_QPS=1``) or gives them whole messages in turns (0,
the default since 2.20; ``net_ib``): what differs is the last message, which :func:`ring` gives to the queue pairs that get it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclwatch.errors import UsageError
from ncclwatch.model.paths import ElephantFlow
from ncclwatch.paths.fabric import Fabric, Floats, Ints
from ncclwatch.paths.ports import LOWEST, ROCE_PORT

MAX_FLOWS = 1 << 21
"""Bound: flows of all jobs together."""


@dataclass(frozen=True)
class Traffic:
    """Flows, one an element of each array."""

    jobs: tuple[str, ...]
    job: Ints
    ring: Ints
    """Number of the ring (channel) over all jobs."""
    source: Ints
    """NIC"""
    destination: Ints
    """NIC"""
    weight: Floats
    """Bytes of an iteration beside those of other flows of its job; 1 where all carry the same."""
    movable: NDArray[np.bool_]
    """Whether a plan may give it another path."""
    source_port: Ints
    """UDP or TCP source port as it is now."""
    destination_port: Ints

    def __len__(self) -> int:
        return len(self.job)

    def part(self, keep: NDArray[np.bool_] | Ints) -> Traffic:
        """Some of the flows, by a mask or by their numbers; jobs keep theirs."""
        return Traffic(
            self.jobs,
            self.job[keep],
            self.ring[keep],
            self.source[keep],
            self.destination[keep],
            self.weight[keep],
            self.movable[keep],
            self.source_port[keep],
            self.destination_port[keep],
        )


@dataclass(frozen=True, slots=True)
class Ring:
    """A job that does ring AllReduces.

    ``hosts`` in ring order; ``channels`` rings through each NIC of a host; ``messages`` of an iteration on each connection
    matter with ``split`` false only: they are dealt to the queue pairs in turns. 0: so many that the last does not count.
    """

    job: str
    hosts: Sequence[int]
    channels: int = 1
    queue_pairs: int = 1
    split: bool = True
    messages: int = 0


def rings(fabric: Fabric, wanted: Sequence[Ring], nics_per_host: int, seed: int) -> Traffic:
    """Flows of ring AllReduces in a regular fabric. NIC k sends to NIC k of the next host (``NCCL_CROSS_NIC=0``).

    Source ports are drawn from RoCE's range with ``seed``, as queue pair numbers would decide them.
    """
    rows: list[tuple[int, int, int, int, float]] = []
    ring = 0
    for number, job in enumerate(wanted):
        if len(job.hosts) < 2 or min(job.channels, job.queue_pairs) < 1:
            raise UsageError(f"job {job.job} has no ring", "give it two hosts or more, one channel and one queue pair or more")
        weights = _weights(job)
        for _ in range(job.channels):
            for nic in range(nics_per_host):
                ends = [host * nics_per_host + nic for host in job.hosts]
                rows += [
                    (number, ring, a, b, weight) for a, b in zip(ends, ends[1:] + ends[:1], strict=True) for weight in weights
                ]
                ring += 1
        if len(rows) > MAX_FLOWS:
            raise UsageError("there are too many flows", f"at most {MAX_FLOWS} are modelled")
    table = np.array(rows, np.float64).reshape(-1, 5)
    job_, ring_, source, destination = (table[:, k].astype(np.int64) for k in range(4))
    if len(table) and max(source.max(), destination.max()) >= len(fabric.nics):
        raise UsageError("a job uses a host that the fabric lacks", f"hosts are 0 to {len(fabric.nics) // nics_per_host - 1}")
    ports = np.random.default_rng(seed).integers(LOWEST, 1 << 16, len(table))
    return Traffic(
        tuple(job.job for job in wanted),
        job_,
        ring_,
        source,
        destination,
        table[:, 4],
        np.ones(len(table), bool),
        ports,
        np.full(len(table), ROCE_PORT),
    )


def _weights(job: Ring) -> list[float]:
    """Bytes of each queue pair of a connection; 1 on average."""
    if job.split or not job.messages:
        return [1.0] * job.queue_pairs
    each, more = divmod(job.messages, job.queue_pairs)
    return [(each + (k < more)) * job.queue_pairs / job.messages for k in range(job.queue_pairs) if each + (k < more)]


def of_flows(fabric: Fabric, flows: Sequence[ElephantFlow], movable: NDArray[np.bool_] | None = None) -> Traffic:
    """Flows as seen on hosts. Raises :class:`UsageError` for a NIC that the fabric lacks. Source port 0: not known."""
    if len(flows) > MAX_FLOWS:
        raise UsageError("there are too many flows", f"at most {MAX_FLOWS} are modelled")
    jobs = tuple(sorted({flow.job for flow in flows}))
    ends = [_ends(fabric, flow) for flow in flows]
    ring_keys = {key: i for i, key in enumerate(dict.fromkeys((flow.job, flow.channel) for flow in flows))}
    weights = np.array([flow.rate or flow.share or 0.0 for flow in flows], np.float64)
    job = np.array([jobs.index(flow.job) for flow in flows], np.int64)
    for number in range(len(jobs)):
        # Rates of some and shares of others cannot be compared: then all of that job weigh the same.
        own = np.flatnonzero(job == number).tolist()
        alike = all(flows[i].rate for i in own) or all(flows[i].share for i in own)
        weights[own] = weights[own] / weights[own].mean() if alike else 1.0
    return Traffic(
        jobs,
        job,
        np.array([ring_keys[flow.job, flow.channel] for flow in flows], np.int64),
        np.array([source for source, _ in ends], np.int64),
        np.array([destination for _, destination in ends], np.int64),
        weights,
        np.ones(len(flows), bool) if movable is None else movable,
        np.array([flow.tuple.source_port if flow.tuple else 0 for flow in flows], np.int64),
        np.array([flow.tuple.destination_port if flow.tuple else ROCE_PORT for flow in flows], np.int64),
    )


def _ends(fabric: Fabric, flow: ElephantFlow) -> tuple[int, int]:
    found = []
    for port in (flow.source, flow.destination):
        number = fabric.number.get((port.host, port.nic))
        if number is None:
            raise UsageError(f"the fabric has no NIC {port.nic} of host {port.host}", "add it to the file of the fabric")
        found.append(number)
    return found[0], found[1]
