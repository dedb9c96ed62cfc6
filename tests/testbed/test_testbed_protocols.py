"""Real NCCL on the CPU testbed by LL, by LL128 and on trees, element by element, and what it chooses by itself."""

from __future__ import annotations

import pytest

from testbed.choices import LOG, PROTOCOLS, chosen, not_covered
from testbed.job import VERSIONS, Job, available, has_secret_memory
from testbed.test_testbed_correctness import finish

pytestmark = pytest.mark.attach

SILENT = "2.19.3"
"""Writes nothing of its choices: there only the results are checked."""
PLAYED = (SILENT, *VERSIONS)
BUSHY = (1, 1, 2, 1)
"""Hosts whose tree has a rank with two children on other hosts, and one with a child on its own."""


@pytest.fixture(params=PLAYED)
def version(request: pytest.FixtureRequest) -> str:
    if not available(request.param):
        pytest.skip(f"NCCL {request.param} is not in the cache")
    return str(request.param)


@pytest.mark.parametrize("protocol", ["LL", "LL128"])
def test_rings_of_lines_compute_every_collective_type_and_reduction(version: str, protocol: str) -> None:
    """Three ranks by shared memory, one by the network; small Send/Recv inside the node go by LL in both."""
    with Job(
        version, 4, "sweep", hosts=(3, 1), iterations=1, count=2503, verify=True, env=LOG, protocol=protocol, wait_for="nothing"
    ) as job:
        finish(job)
        pairs = {(choice.algorithm, choice.protocol) for choice in chosen(job.log(0))}
        assert pairs == (set() if version == SILENT else {("Ring", protocol)})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_trees_reduce_every_type(version: str, protocol: str) -> None:
    with Job(
        version, 5, "sweep", hosts=BUSHY, iterations=1, count=2503, verify=True, env=LOG,
        algorithm="Tree", protocol=protocol, wait_for="nothing",
    ) as job:  # fmt: skip
        finish(job)
        choices = chosen(job.log(0))
        if version != SILENT:
            assert {choice.protocol for choice in choices if choice.algorithm == "Tree"} == {protocol}
            assert all(choice.algorithm == "Tree" for choice in choices if choice.collective == "AllReduce")


@pytest.mark.parametrize("protocol", ["LL", "LL128"])
@pytest.mark.parametrize("algorithm", ["Ring", "Tree"])
def test_messages_larger_than_the_buffers_of_lines(algorithm: str, protocol: str) -> None:
    with Job(
        "2.27.5", 4, "allreduce", hosts=(2, 2), iterations=2, count=1_500_007, verify=True, extra=("--burst", "3"),
        algorithm=algorithm, protocol=protocol, wait_for="nothing",
    ) as job:  # fmt: skip
        finish(job)


@pytest.mark.parametrize(("release", "ranks"), [("2.27.5", 3), ("2.32.3", 7)])
def test_pat_gathers_and_scatters(release: str, ranks: int) -> None:
    """Messages of which one step takes several blocks, and some of which each takes several steps."""
    with Job(
        release, ranks, "sizes", iterations=1, count=1 << 18, verify=True, env=LOG, algorithm="PAT", wait_for="nothing"
    ) as job:
        finish(job)
        choices = chosen(job.log(0))
    by_pat = {choice.collective for choice in choices if (choice.algorithm, choice.protocol) == ("PAT", "Simple")}
    assert by_pat == {"AllGather", "ReduceScatter"}
    assert not any(choice.algorithm != "PAT" for choice in choices if choice.collective in by_pat), choices


@pytest.mark.parametrize(("type_", "reduction"), [("i8", "prod"), ("f64", "max")])
def test_pat_reduces_other_types(type_: str, reduction: str) -> None:
    extra = ("--type", type_, "--reduction", reduction)
    with Job(
        "2.27.5", 5, "reducescatter", iterations=2, count=40_011, verify=True, extra=extra, env=LOG, algorithm="PAT",
        wait_for="nothing",
    ) as job:  # fmt: skip
        finish(job)
        assert {choice.algorithm for choice in chosen(job.log(0))} == {"PAT"}


def test_nccl_likes_pat_among_eight_hosts_of_one_rank() -> None:
    """Some kilobytes each; among four hosts its own table gives rings the lower latency (``ncclTopoTuneModel``)."""
    with Job(
        "2.27.5", 8, "sizes", iterations=1, count=1 << 12, verify=True, env=LOG, as_nccl_likes=True, wait_for="nothing"
    ) as job:
        finish(job)
        choices = chosen(job.log(0))
    by_pat = {choice.collective for choice in choices if (choice.algorithm, choice.protocol) == ("PAT", "Simple")}
    assert by_pat == {"AllGather", "ReduceScatter"}, choices


@pytest.mark.parametrize(("release", "batched"), [("2.27.5", False), ("2.32.3", True)])
def test_broadcasts_of_a_group_are_one_operation_from_2_29_on(release: str, batched: bool) -> None:
    """Where NCCL batches broadcasts of several roots (AllGatherV), it chooses for none of them, and says nothing in its log."""
    with Job(
        release, 4, "allgatherv", hosts=(2, 2), iterations=3, count=300_007, verify=True, env=LOG, wait_for="nothing"
    ) as job:
        finish(job)
        assert any(choice.collective == "Broadcast" for choice in chosen(job.log(0))) is not batched


@pytest.mark.parametrize("protocol", ["LL", "LL128"])
def test_an_abort_ends_kernels_that_wait_for_flags(protocol: str) -> None:
    extra = ("--abort-after", "0.5")
    with Job(
        "2.27.5", 4, "abort", "mixed", iterations=2, count=20_011, extra=extra, protocol=protocol, wait_for="nothing"
    ) as job:
        finish(job)


CHOSEN = {(2, 2): {("Tree", "LL"), ("Ring", "LL"), ("Ring", "Simple")}, (4,): {("Ring", "LL"), ("Ring", "Simple")}}
"""By hosts: what every release chooses by itself for some size between 8 bytes and 2 MiB."""
NEVER = {(2, 2): {"Ring/LL128", "Tree/LL128"}, (4,): {"Ring/LL128", "Tree/LL", "Tree/LL128", "Tree/Simple"}}
"""What it does not choose here: LL128 wants NVLink (``ncclTopoTuneModel``, src/graph/tuning.cc), a tree more than one host."""


@pytest.mark.parametrize("hosts", CHOSEN)
def test_what_nccl_likes_by_itself(version: str, hosts: tuple[int, ...]) -> None:
    with Job(
        version,
        4,
        "sizes",
        hosts=hosts,
        iterations=1,
        count=1 << 19,
        verify=True,
        env=LOG,
        as_nccl_likes=True,
        wait_for="nothing",
    ) as job:
        finish(job)
        choices = chosen(job.log(0))
    if version == SILENT:
        return
    assert min(choice.nbytes for choice in choices) == 8
    assert {(choice.algorithm, choice.protocol) for choice in choices} >= CHOSEN[hosts], choices
    assert set(not_covered(choices)) >= NEVER[hosts], choices


LINKED = {
    (4,): ({("Ring", "LL"), ("Ring", "LL128"), ("Ring", "Simple")}, {"Tree/LL", "Tree/LL128", "Tree/Simple"}),
    (2, 2): ({("Ring", "LL"), ("Ring", "Simple"), ("Tree", "LL")}, {"Ring/LL128", "Tree/LL128"}),
}
"""By hosts: what every release chooses by itself where four NVLinks join each GPU to a switch of its host, and what none does."""


@pytest.mark.long
@pytest.mark.skipif(not has_secret_memory(), reason="no secret memory (memfd_secret)")
@pytest.mark.parametrize(("release", "hosts"), [(release, hosts) for release in PLAYED for hosts in LINKED])
def test_what_nccl_likes_on_nodes_with_nvlink(release: str, hosts: tuple[int, ...]) -> None:
    """LL128 for messages of a mebibyte: connections are P2P/IPC then, because NCCL found the links itself."""
    if not available(release):
        pytest.skip(f"NCCL {release} is not in the cache")
    env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING,INIT,GRAPH,P2P"}
    with Job(
        release, 4, "sizes", hosts=hosts, iterations=1, count=1 << 19, verify=True, env=env,
        as_nccl_likes=True, nvlinks=4, wait_for="nothing",
    ) as job:  # fmt: skip
        finish(job)
        log = job.log(0)
    assert "NVS/0" in log and "via P2P/IPC" in log and "via SHM" not in log
    choices = chosen(log)
    if release == SILENT:
        return
    wanted, never = LINKED[hosts]
    assert {(choice.algorithm, choice.protocol) for choice in choices} >= wanted, choices
    assert set(not_covered(choices)) >= never, choices
