"""Work requests of real NCCL's InfiniBand transport, on stand-ins for adapters: windows say what the collective must move, and of
a job that stands counts that are ordered say what was posted, completed and taken."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ncclwatch.cli.diagnose import judge
from ncclwatch.engine.evidence.work_requests import Shows
from ncclwatch.model.verdict import Verdict, VerdictClass
from testbed import work_checks
from testbed.adapters import AdapterNetwork, name_of, standing
from testbed.job import Job

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

VERSION = "2.27.5"
COUNT = 1 << 18
"""Floats of one AllReduce: with two ranks each sends as many bytes as the buffer has."""
SLOW = 1 << 20
"""Bytes a second of a link that is to be slow, and the floats of a call that takes it four seconds."""
VICTIM = 1


@pytest.fixture(scope="module")
def network() -> Iterator[AdapterNetwork]:
    with standing(), AdapterNetwork(hosts=2) as made:
        yield made


@pytest.fixture(autouse=True)
def healthy(network: AdapterNetwork) -> Iterator[None]:
    yield
    for host in range(2):
        network.link(host).clear()


def paced(network: AdapterNetwork, **options: Any) -> Job:
    return network.job(VERSION, 2, count=COUNT, extra=("--time", "--pause-us", "5000"), **options)


def test_exact_windows_are_what_the_collective_must_move(network: AdapterNetwork) -> None:
    with paced(network) as job:
        work_checks.exact_windows_are_what_must_move(work_checks.Moves(job, COUNT * 4), (name_of(0), name_of(1)))


@pytest.mark.long
def test_every_request_is_counted_while_that_is_cheap(network: AdapterNetwork) -> None:
    with paced(network) as job:
        work_checks.every_request_is_counted_while_that_is_cheap(work_checks.Moves(job, COUNT * 4))


def test_bursts_tell_rates_and_an_order_is_answered(network: AdapterNetwork) -> None:
    with paced(network) as job:
        work_checks.bursts_tell_rates_and_an_order_is_answered(work_checks.Moves(job, COUNT * 4))


def test_a_collector_that_is_killed_leaves_no_probe_behind(network: AdapterNetwork) -> None:
    with paced(network) as job:
        work_checks.a_killed_collector_leaves_no_probe_behind(job)


def test_what_goes_in_a_burst_leaves_no_probe_behind_and_nothing_unsaid(network: AdapterNetwork) -> None:
    link = network.link(VICTIM)
    # A long timeout of the adapter: no error of NCCL's is to end the ranks meanwhile.
    with paced(network, env={"NCCL_IB_TIMEOUT": "22"}) as job:
        work_checks.what_goes_in_a_burst_is_answered_for(job, link.nic, link.down)


def verdict_on(job: Job) -> Verdict:
    """What ``diagnose`` says of a job that hangs already, once."""
    work_checks.until_still(job)
    began = time.monotonic()
    verdicts, problems, _ = judge(job.pids, (), every=False, wait=60.0, interval=1.0, wire=True)
    print(f"judged after {time.monotonic() - began:.1f} s", *verdicts[0].evidence, verdicts[0].summary, sep="\n")
    assert not problems
    return verdicts[0]


def test_what_was_posted_and_does_not_complete_is_said(network: AdapterNetwork) -> None:
    """The cable is pulled while data is under way: a call takes seconds."""
    network.link(VICTIM).limit(SLOW)
    with network.job(VERSION, 2, count=SLOW, env={"NCCL_IB_TIMEOUT": "22"}, wait_for="ready") as job:
        time.sleep(2.0)
        network.link(VICTIM).down()
        verdict = verdict_on(job)
    assert verdict.verdict_class is VerdictClass.HARDWARE, verdict
    assert any(str(Shows.NOT_COMPLETED) in line for line in work_checks.lines_of(verdict)), verdict


def test_that_nobody_takes_completions_is_said(network: AdapterNetwork) -> None:
    with network.job(VERSION, 2, count=COUNT, extra=("--fault", f"stall_proxy:rank={VICTIM},at=40")) as job:
        verdict = verdict_on(job)
    assert [culprit.rank for culprit in verdict.culprits] == [VICTIM], verdict
    # Which it is depends on where the proxy was when it fell asleep.
    said = [line for line in work_checks.lines_of(verdict) if line.startswith(f"rank {VICTIM} ")]
    assert any(str(one) in line for one in (Shows.NOT_RECEIVED, Shows.NOT_TAKEN) for line in said), verdict


def test_a_rank_that_is_stopped_is_named_though_its_adapter_goes_on(network: AdapterNetwork) -> None:
    with network.job(VERSION, 2, count=COUNT) as job:
        job.freeze(VICTIM)
        verdict = verdict_on(job)
        job.thaw(VICTIM)
    assert [culprit.rank for culprit in verdict.culprits] == [VICTIM], verdict
    assert verdict.verdict_class is VerdictClass.STOPPED, verdict
