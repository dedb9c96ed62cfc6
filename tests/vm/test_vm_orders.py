"""Counts of work requests that a verdict on a job that stands orders, of real NCCL over its InfiniBand transport."""

from __future__ import annotations

import os
import time

import pytest

from ncclwatch.cli.diagnose import judge
from ncclwatch.cli.live import LiveSession
from ncclwatch.collect.paths import PathProbes
from ncclwatch.engine.evidence.work_requests import Shows
from ncclwatch.model.network import PathAnswer
from ncclwatch.model.verdict import VerdictClass
from testbed.job import Job, WaitFor, available
from testbed.work_checks import lines_of, until_still
from vm.fabric import Fabric, command
from vm.guest import FULL_VARIABLE

pytestmark = pytest.mark.vm

VERSION = "2.32.3"
VICTIM = 1
SLOW = 1 << 18
"""Bytes a second of a port that is to be slow, and the floats of a call that takes it four seconds."""
WAIT_S = 120.0
"""Loading the programs takes long on an emulated machine. What is counted is told at once, and not waited for."""


def job_of(fabric: Fabric, *extra: str, count: int = 1 << 14, wait_for: WaitFor = "running") -> Job:
    if not available(VERSION):
        pytest.skip(f"NCCL {VERSION} is not in the cache")
    # A long timeout of the adapter: what is judged is a hang, not the error that ends it.
    return fabric.job(VERSION, 2, count=count, extra=extra, env={"NCCL_IB_TIMEOUT": "21"}, start_timeout=240, wait_for=wait_for)


def swallow(fabric: Fabric, *, swallows: bool) -> None:
    """Have both ends of the cable lose all that is sent, or no more."""
    for port in (fabric.a, fabric.b):
        command(f"tc qdisc {'replace' if swallows else 'del'} dev {port.netdev} root{' netem loss 100%' if swallows else ''}")


@pytest.mark.skipif(FULL_VARIABLE not in os.environ, reason=f"part of the full matrix: set {FULL_VARIABLE}")
@pytest.mark.timeout(600)
def test_what_was_posted_and_does_not_complete_is_said(soft_roce: Fabric) -> None:
    """Everything that is sent is lost: ``attach`` orders counts by itself and says so, and so does ``diagnose`` afterwards."""
    with job_of(soft_roce) as job:
        session = LiveSession(every=False)
        notes: list[str] = []
        told: list[str] = []
        try:
            session.start(job.pids, calls=False)
            started = time.monotonic()
            while not any(plane.name == "wire" and plane.running for plane in session.planes) and time.monotonic() < started + 90:
                session.step()
            print(f"the plane runs after {time.monotonic() - started:.1f} s", *session.planes, sep="\n")
            swallow(soft_roce, swallows=True)
            began = time.monotonic()
            while not told and time.monotonic() < began + 180:
                update = session.step()
                notes += update.notes
                if update.verdict is not None and update.verdict.verdict_class.accuses:
                    told = lines_of(update.verdict)
            print(f"told after {time.monotonic() - began:.1f} s", *notes, *told, sep="\n")
            session.close()
            verdicts, problems, _ = judge(job.pids, (), every=False, wait=WAIT_S, interval=1.0, wire=True)
            print(*verdicts[0].evidence, verdicts[0].summary, sep="\n")
        finally:
            session.close()
            swallow(soft_roce, swallows=False)
        assert any("as ordered; they stand" in note for note in notes), notes
        assert any(str(Shows.NOT_COMPLETED) in line for line in told), (told, notes)
        assert not problems and verdicts[0].verdict_class is VerdictClass.HARDWARE, verdicts[0]
        assert any(str(Shows.NOT_COMPLETED) in line and "ordered" in line for line in lines_of(verdicts[0])), verdicts[0]
        assert "wire" in verdicts[0].planes


@pytest.mark.long
def test_that_nobody_takes_completions_is_said(soft_roce: Fabric) -> None:
    """The proxy thread of rank 1 sleeps."""
    with job_of(soft_roce, "--fault", f"stall_proxy:rank={VICTIM},at=40") as job:
        until_still(job)
        began = time.monotonic()
        verdicts, _, _ = judge(job.pids, (), every=False, wait=WAIT_S, interval=1.0, wire=True)
        took = time.monotonic() - began
        print(f"judged after {took:.1f} s")
        assert took < WAIT_S, "what requests show need not be waited for"
        print(*verdicts[0].evidence, verdicts[0].summary, sep="\n")
        assert [culprit.rank for culprit in verdicts[0].culprits] == [VICTIM], verdicts[0]
        told = [line for line in lines_of(verdicts[0]) if line.startswith(f"rank {VICTIM} ")]
        # Which it is depends on where the proxy was when it fell asleep.
        assert any(str(one) in line for one in (Shows.NOT_RECEIVED, Shows.NOT_TAKEN) for line in told), verdicts[0]


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_path_that_stands_still_is_probed_by_zero_payload_writes(soft_roce: Fabric) -> None:
    """The proxy thread of rank 1 goes to sleep while its steps are in the network: its adapter answers queue pairs of ours.

    What rank 1 sends is slow until then, so that whenever its proxy rests something is under way: it sleeps only where it rests.
    """
    soft_roce.limit(soft_roce.b, SLOW)
    try:
        # In the middle of a call whose first half takes several times as long.
        fault = f"stall_proxy:rank={VICTIM},at=1,group=world,delay_us=1000000"
        with job_of(soft_roce, "--fault", fault, count=SLOW, wait_for="ready") as job:
            job.wait_line(VICTIM, "fault stall_proxy begins", 120)
            time.sleep(1.5)
            soft_roce.unlimited()
            session = LiveSession(every=False, paths=PathProbes(b"sixteen bytes it is"))
            notes: list[str] = []
            answers: list[PathAnswer] = []
            try:
                session.start(job.pids, calls=False)
                began = time.monotonic()
                # While programs are still being loaded, an emulated machine is too slow for the ends to agree on queue pairs: TCP
                # answers then, and the path is probed again when it has stood for longer.
                while not any(one.kind == "rdma" for one in answers) and time.monotonic() < began + 300:
                    update = session.step(until=began + 300)
                    notes += update.notes
                    answers += [flow.path for flow in update.flows if flow.path is not None and flow.path not in answers]
            finally:
                session.close()
            print(f"after {time.monotonic() - began:.0f} s", *notes, *answers, sep="\n")
            assert answers and answers[-1].kind == "rdma" and answers[-1].round_trip_us, (answers, notes)
            assert all(one.alive for one in answers), answers
    finally:
        soft_roce.unlimited()
