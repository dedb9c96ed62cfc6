"""Jobs by LL, by LL128, on trees and by PAT: what memory shows of them, whom a hang is laid to, and silence where all is well."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.state import Transport
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.target import hostconn
from ncclwatch.target.image import load_snapshot, record_snapshot
from ncclwatch.target.session import TargetProcess
from testbed.job import Job, available, has_secret_memory
from testbed.test_diagnose_faults import VICTIM, judge, wait_until_it_stands
from testbed.test_diagnose_job import judge_frozen, look, opened

pytestmark = pytest.mark.attach


@dataclass(frozen=True)
class Case:
    """A job; releases take turns. ``protocol`` and ``algorithm`` empty: as NCCL likes."""

    version: str
    hosts: tuple[int, ...]
    count: int = 20_000
    protocol: str = ""
    algorithm: str = "Ring"
    shape: str = "allreduce"

    def job(self, **more: object) -> Job:
        if not available(self.version):
            pytest.skip(f"NCCL {self.version} is not in the cache")
        chosen = {"protocol": self.protocol, "algorithm": self.algorithm} if self.protocol else {"as_nccl_likes": True}
        arguments = {"ranks": sum(self.hosts), "shape": self.shape, "hosts": self.hosts, "count": self.count} | chosen | more
        return Job(self.version, **arguments)  # type: ignore[arg-type]


INSIDE, APART, MIXED = (4,), (1, 1, 1, 1), (3, 1)
STUCK = {
    "LL-shared-memory": Case("2.21.5", INSIDE, protocol="LL"),
    "LL128-shared-memory": Case("2.27.5", INSIDE, protocol="LL128"),
    "LL-hosts-3-1": Case("2.32.3", MIXED, protocol="LL"),
    "LL-sockets": Case("2.27.5", APART, protocol="LL"),
    "LL-tree-sockets-8-bytes": Case("2.27.5", APART, 2, "LL", "Tree"),
    "LL128-tree-sockets": Case("2.32.3", APART, protocol="LL128", algorithm="Tree"),
    "LL-send-receive": Case("2.32.3", INSIDE, 200, "LL", shape="alltoall"),
    "PAT-gather": Case("2.27.5", APART, protocol="Simple", algorithm="PAT", shape="allgather"),
    "PAT-scatter": Case("2.32.3", APART, protocol="Simple", algorithm="PAT", shape="reducescatter"),
    "LL-batched-broadcasts": Case("2.32.3", MIXED, protocol="LL", shape="allgatherv"),
}


@pytest.mark.parametrize("name", STUCK)
def test_the_rank_that_never_comes_is_named(name: str) -> None:
    with STUCK[name].job(extra=("--fault", f"stuck:rank={VICTIM},at=20"), wait_for="nothing") as job:
        wait_until_it_stands(job, creation=False)
        verdict = judge(job.pids)
    told = f"{verdict.verdict_class}: {verdict.summary} {verdict.evidence}"
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED, told
    assert [culprit.rank for culprit in verdict.culprits] == [VICTIM], told


@pytest.mark.parametrize(("fault", "rank"), [("stuck", 1), ("stall_gpu", 0)])
def test_parent_and_child_of_a_tree_in_one_node_are_told_apart(fault: str, rank: int) -> None:
    """Rank 0 sends for its node what rank 1 gives it: one does not come, or the other's GPU stands still."""
    case = Case("2.27.5", (2, 2), 2, "LL", "Tree")
    extra = ("--fault", f"{fault}:rank={rank},at=20", "--pause-us", "1000")
    with case.job(extra=extra, wait_for="nothing") as job:
        if fault == "stall_gpu":
            job.wait_line(rank, "gpu stalled", 60)
        wait_until_it_stands(job, creation=False)
        verdict = judge(job.pids)
    told = f"{verdict.verdict_class}: {verdict.summary} {verdict.evidence}"
    assert [culprit.rank for culprit in verdict.culprits] == [rank], told
    assert verdict.verdict_class in (VerdictClass.NOT_ENTERED, VerdictClass.HARDWARE), told


def test_a_proxy_that_stalls_under_ll128_accuses_nobody_beyond_its_link() -> None:
    """Memory alone does not always tell a proxy that does not receive from a link that does not carry: both may be named."""
    case = Case("2.27.5", APART, protocol="LL128")
    with case.job(extra=("--fault", f"stall_proxy:rank={VICTIM},at=20"), wait_for="nothing") as job:
        wait_until_it_stands(job, creation=False)
        verdict = judge(job.pids)
    told = f"{verdict.verdict_class}: {verdict.summary} {verdict.evidence}"
    assert verdict.verdict_class in (VerdictClass.HARDWARE, VerdictClass.UNKNOWN), told
    named = {culprit.rank for culprit in verdict.culprits}
    ends = [{VICTIM, (VICTIM + step) % 4} for step in (1, 3)] if "link" in verdict.rules else []
    assert named in [set(), {VICTIM}, *ends], told


@pytest.mark.parametrize(
    "case",
    [
        Case("2.27.5", (2, 2), 2),
        Case("2.32.3", INSIDE, protocol="LL"),
        Case("2.21.5", (2, 2), protocol="LL128", algorithm="Tree"),
    ],
    ids=["as-NCCL-likes-8-bytes", "LL-shared-memory", "LL128-tree"],
)
def test_silent_while_all_is_well_and_a_frozen_rank_is_named(case: Case) -> None:
    with case.job() as job:
        with opened(job) as targets:
            for _ in range(5):
                verdict = diagnose(look(targets, 1.0))
                assert not verdict.verdict_class.accuses, f"{verdict.summary} {verdict.evidence}"
        for victim in range(4):
            verdict = judge_frozen(job, victim)
            told = f"rank {victim}: {verdict.summary} {verdict.evidence}"
            assert verdict.verdict_class is VerdictClass.STOPPED, told
            assert [culprit.rank for culprit in verdict.culprits] == [victim], told


@pytest.mark.parametrize("shape", ["allreduce", "alltoall"])
def test_flags_show_what_no_tail_counts(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small Send/Recv inside a node goes by LL by NCCL's own choice: the tails it leaves alone show that."""
    case = Case("2.27.5", INSIDE, 200, "LL", shape=shape)
    with case.job() as job, TargetProcess.open(job.pid(1)) as target:
        job.wait_progress(3)
        for _ in range(50):
            seen = [c for c in target.sample().communicators[0].host_connections if c.head]
            # A line that was written while the others were read leaves it open.
            known = [c for c in seen if c.tail is not None]
            if known:
                break
        monkeypatch.setattr(hostconn, "newest_lines", lambda *arguments: [None] * len(arguments[2]))
        bare = [c for c in target.sample().communicators[0].host_connections if c.head]
    used = 0 if shape == "allreduce" else 1
    assert seen and {c.connection_index for c in seen} == {used}
    assert known and all(c.transport is Transport.SHM for c in seen)
    assert all(c.head <= c.tail for c in known if c.head is not None and c.tail is not None)
    assert {c.tail for c in bare} == {0}


def test_a_snapshot_keeps_flags_and_no_data(tmp_path: Path) -> None:
    with Case("2.27.5", INSIDE, protocol="LL").job() as job:
        job.freeze(VICTIM)
        time.sleep(1.0)
        record_snapshot([job.pid(3)], tmp_path / "ll.ncw", samples=2, interval=0.2)
        with TargetProcess.open(job.pid(3)) as target:
            live = target.sample()
    ((_, recorded),) = load_snapshot(tmp_path / "ll.ncw")
    assert recorded.communicators == live.communicators
    assert any(c.tail for c in recorded.communicators[0].host_connections)
    assert (tmp_path / "ll.ncw").stat().st_size < 200_000


@pytest.mark.skipif(not has_secret_memory(), reason="no secret memory (memfd_secret)")
def test_a_gpu_that_stalls_over_nvlink_is_no_rest() -> None:
    """Nothing in the host's memory tells which: but that the job may hang is said, and why nobody is named."""
    extra = ("--fault", f"stall_gpu:rank={VICTIM},at=20", "--pause-us", "1000")
    with Job("2.27.5", 4, "allreduce", nvlinks=4, count=20_000, as_nccl_likes=True, extra=extra, wait_for="nothing") as job:
        job.wait_line(VICTIM, "gpu stalled", 60)
        wait_until_it_stands(job, creation=False)
        command = [sys.executable, "-m", "ncclwatch", "diagnose", "--json", *map(str, job.pids)]
        said = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
    assert (said["class"], said["culprits"]) == ("unknown", []), said
    assert "hides whether an operation is open" in said["summary"]
    assert any("P2P/NVLink" in line for line in said["unobserved"])
