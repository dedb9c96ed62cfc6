"""How processes of a job differ: only what is not the same, who stands out, and who does not."""

from __future__ import annotations

from dataclasses import replace

import jsonschema
import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.knowledge.compare import differences, facts, names, of_culprit
from ncclwatch.knowledge.match import MOST_COMPARED, informed
from ncclwatch.knowledge.tickets import by_place
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.traits import GpuTrait, NicTrait, Traits
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass, schema
from unit.synthetic import frozen_ring, looks

NICS = tuple(NicTrait(f"mlx5_{n}", "400 Gb/sec", "28.39", "ConnectX-7", "16 lanes at 32.0 GT/s PCIe", "4096") for n in range(2))
TRAITS = Traits(
    settings=(("NCCL_ALGO", "Ring"),), cpus="0-7", machine="x86_64", driver="570.86", nics=NICS,
    gpus=(GpuTrait("0000:07:00.0", "H100"), GpuTrait("0000:08:00.0", "H100")),
)  # fmt: skip


def _samples(*traits: Traits | None) -> list[ProcessSample]:
    found = [samples[-1] for samples in looks(frozen_ring(world=len(traits)))]
    return [replace(one, process=replace(one.process, traits=own)) for one, own in zip(found, traits, strict=True)]


def test_what_is_the_same_is_not_told() -> None:
    assert differences(_samples(TRAITS, TRAITS, TRAITS)) == []
    # Pinned to other CPUs, but to as many.
    assert differences(_samples(TRAITS, replace(TRAITS, cpus="8-15"), replace(TRAITS, cpus="16-19,32-35"))) == []


def test_each_thing_that_differs_is_told_with_who() -> None:
    other = replace(
        TRAITS, settings=(("NCCL_ALGO", "Ring"), ("NCCL_CROSS_NIC", "1")), cpus="0-1", driver="550.54", cpu_quota=2.0,
        nics=(NICS[0], replace(NICS[1], rate="200 Gb/sec", firmware="28.37")),
    )  # fmt: skip
    found = {one.what: one for one in differences(_samples(TRAITS, TRAITS, other, TRAITS))}
    told = {what: [(value, names(whose)) for value, whose in one.values] for what, one in found.items()}
    assert told == {
        "CUDA driver": [("570.86", "ranks 0-1, 3"), ("550.54", "rank 2")],
        "CPUs it may use": [("8", "ranks 0-1, 3"), ("2", "rank 2")],
        "CPU limit": [("none", "ranks 0-1, 3"), ("2 CPUs", "rank 2")],
        "NIC rate": [("400 Gb/sec × 2", "ranks 0-1, 3"), ("200 Gb/sec, 400 Gb/sec", "rank 2")],
        "NIC firmware": [("28.39 × 2", "ranks 0-1, 3"), ("28.37, 28.39", "rank 2")],
        "NCCL_CROSS_NIC": [("not set", "ranks 0-1, 3"), ("1", "rank 2")],
    }


def test_what_nobody_knows_of_one_is_no_difference() -> None:
    assert differences(_samples(TRAITS, None, TRAITS)) == []
    (one,) = differences(_samples(TRAITS, None, replace(TRAITS, driver="1")))
    assert names(one.unknown) == "rank 1"


def test_what_each_has_of_its_own_makes_nobody_stand_out() -> None:
    own = [replace(TRAITS, settings=(("NCCL_HOSTID", str(n)), ("CUDA_VISIBLE_DEVICES", str(n)))) for n in range(4)]
    (one,) = differences(_samples(*own))
    assert (one.what, one.each_its_own) == ("NCCL_HOSTID", True)
    culprit, *peers = _samples(*own)
    assert of_culprit(culprit, peers) == []


def test_a_culprit_does_not_stand_out_by_what_its_host_is_called() -> None:
    """Most of its peers are on another host: that host's name for itself is no reason."""
    hosts = [replace(TRAITS, settings=(("NCCL_HOSTID", host), ("NCCL_DEBUG", level))) for host, level in ("ai", "bw", "bw", "bw")]
    culprit, *peers = _samples(*hosts)
    assert [one.what for one in of_culprit(culprit, peers)] == ["NCCL_DEBUG"]


def test_a_culprit_stands_out_against_a_majority_only() -> None:
    slow = replace(TRAITS, driver="550.54")
    culprit, *peers = _samples(slow, TRAITS, TRAITS, TRAITS)
    (told,) = of_culprit(culprit, peers)
    assert (told.line, told.kind) == ("CUDA driver: 550.54; of most peers (3 of 3): 570.86", None)
    culprit, *peers = _samples(slow, slow, TRAITS, TRAITS)
    assert of_culprit(culprit, peers[:1]) == []
    assert [one.line for one in of_culprit(culprit, peers)] == ["CUDA driver: 550.54; of most peers (2 of 3): 570.86"]
    assert of_culprit(culprit, peers[:2]) == [], "as many as agree with it"
    assert of_culprit(*_first(_samples(slow, slow, slow, TRAITS))) == []
    divided = [replace(TRAITS, driver=str(n)) for n in (1, 2, 2, 3, 4)]
    assert of_culprit(*_first(_samples(*divided))) == [], "its peers do not agree among themselves"


def _first(samples: list[ProcessSample]) -> tuple[ProcessSample, list[ProcessSample]]:
    return samples[0], samples[1:]


def test_a_verdict_carries_how_its_culprit_differs() -> None:
    slow = replace(TRAITS, settings=(("NCCL_ALGO", "Tree"),))
    series = [
        [replace(one, process=replace(one.process, traits=slow if rank == 2 else TRAITS)) for one in samples]
        for rank, samples in enumerate(looks(frozen_ring()))
    ]
    verdict = informed(diagnose(series), by_place(samples[-1] for samples in series))
    assert verdict.differences == ("NCCL_ALGO: Tree; of most peers (3 of 3): Ring",)
    jsonschema.validate(verdict.to_json(), schema())


def _slow(reason: str, culprits: int, *traits: Traits) -> Verdict:
    """A slow job whose first ranks are named, with what is known of it."""
    samples = _samples(*traits)
    named = [one.process for one in samples[:culprits]]
    blamed = tuple(Culprit(one.rank, one.rank, one.host, one.pid, 0, reason=reason) for one in named)
    return informed(Verdict(VerdictClass.SLOW_COMPUTATION, "", blamed), by_place(samples))


FEW = replace(TRAITS, cpus="4", cpu_group="4-5")
WIDE = replace(TRAITS, cpus="0-3", cpu_group="0-7")


def test_a_culprit_with_fewer_cpus_than_its_peers_is_explained_by_that() -> None:
    found = _slow("host: it calls late", 1, FEW, WIDE, WIDE)
    assert found.knowledge[0].row == "cpu-set"
    assert found.differences == (
        "CPUs it may use: 1; of most peers (2 of 2): 4",
        "CPUs of its control group: 2; of most peers (2 of 2): 8",
    )


def test_of_a_host_whose_ranks_are_all_named_the_same_is_told() -> None:
    found = _slow("host: they call late", 6, *[FEW] * 6, *[WIDE] * 6)
    assert found.knowledge[0].row == "cpu-set"
    assert len(found.differences) == 2 * MOST_COMPARED


@pytest.mark.parametrize(
    ("reason", "traits"),
    [
        ("host: as many as its peers", (WIDE, WIDE, WIDE)),
        ("host: more than its peers", (WIDE, FEW, FEW)),
        ("host: pinned to other CPUs, as many", (replace(WIDE, cpus="4-7"), WIDE, WIDE)),
        ("host: its peers are divided", (FEW, WIDE, replace(WIDE, cpus="0-1"))),
        ("host: nothing is known of it", (replace(FEW, cpus=""), WIDE, WIDE)),
        ("link: what CPUs cannot explain", (FEW, WIDE, WIDE)),
    ],
)
def test_no_set_of_cpus_is_the_cause(reason: str, traits: tuple[Traits, ...]) -> None:
    assert "cpu-set" not in [one.row for one in _slow(reason, 1, *traits).knowledge]


def test_a_gpu_is_that_of_the_rank_where_its_bus_is_known() -> None:
    mixed = replace(TRAITS, gpus=(GpuTrait("0000:07:00.0", "H100"), GpuTrait("0000:08:00.0", "H200")))
    (sample,) = _samples(mixed)[:1]
    assert facts(sample)["GPU"] == "H100, H200"
    known = replace(sample, communicators=tuple(replace(one, bus_id=0x8000) for one in sample.communicators))
    assert facts(known)["GPU"] == "H200"
