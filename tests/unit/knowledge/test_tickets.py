"""What a ticket needs of a culprit."""

from __future__ import annotations

from dataclasses import replace

import jsonschema
import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.knowledge.match import informed
from ncclwatch.knowledge.tickets import by_place
from ncclwatch.model.network import NicRecord
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.traits import GpuTrait, Traits
from ncclwatch.model.verdict import Verdict, schema
from ncclwatch.text import Style, bus_text
from ncclwatch.view.verdict_text import verdict_lines
from unit.synthetic import frozen_ring, looks

TRAITS = Traits(
    node="gpu17", job="4711", namespace="ml", pod="train-3", settings=(("NCCL_CROSS_NIC", "1"),), machine="x86_64",
    gpus=(GpuTrait("0000:07:00.0", "NVIDIA H100", "GPU-1234"), GpuTrait("0000:08:00.0", "NVIDIA H100", "GPU-5678")),
)  # fmt: skip


def _with(sample: ProcessSample, traits: Traits | None) -> ProcessSample:
    bus = tuple(replace(one, bus_id=0x000007000, device=0) for one in sample.communicators)
    return replace(sample, process=replace(sample.process, traits=traits, version=(2, 27, 5)), communicators=bus)


def _told(traits: Traits | None, **nic: object) -> Verdict:
    series = [[_with(sample, traits) for sample in samples] for samples in looks(frozen_ring())]
    verdict = diagnose(series)
    host = verdict.culprits[0].host
    nics = [NicRecord(host, "mlx5_3", "rdma", True, "active", used_by=(2,)), NicRecord(host, "mlx5_4", "rdma", True, "active")]
    return informed(verdict, by_place(samples[-1] for samples in series), nics)


def test_a_culprit_carries_node_job_pod_gpu_and_nic() -> None:
    verdict = _told(TRAITS)
    ticket = verdict.culprits[0].ticket
    assert ticket is not None
    assert (ticket.node, ticket.job, ticket.namespace, ticket.pod) == ("gpu17", "4711", "ml", "train-3")
    assert (ticket.gpu_uuid, ticket.nics) == ("GPU-1234", ("mlx5_3",))
    jsonschema.validate(verdict.to_json(), schema())
    assert any(
        "Slurm job 4711  pod ml/train-3  GPU-1234  NIC mlx5_3" in line for line in verdict_lines(verdict, Style(enabled=False))
    )


def test_without_traits_the_host_is_the_node() -> None:
    ticket = _told(None).culprits[0].ticket
    assert ticket is not None
    assert ticket.node == _told(None).culprits[0].host
    assert (ticket.job, ticket.gpu_uuid) == ("", "")


@pytest.mark.parametrize(("number", "text"), [(0x7000, "0000:07:00.0"), (0x1000DE000, "1000:de:00.0"), (0x2D1B1, "0000:2d:1b.1")])
def test_bus_ids(number: int, text: str) -> None:
    assert bus_text(number) == text
