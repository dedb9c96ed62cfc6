"""Faults of the network under real jobs, in network namespaces: they show in the job's own iteration times, and what is said of
them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest

from testbed.job import Job
from testbed.netns import Network
from testbed.network_times import measure, spread
from testbed.watcher import Live, live, pids

pytestmark = [pytest.mark.attach, pytest.mark.paced]

RATE = 25e6
"""Bytes a second of every link: more than the job needs, little enough that background traffic can fill it."""

TRAINING = ("--pp", "2", "--micro-batches", "2", "--layers", "1", "--forward-us", "2000", "--gradients", "32768", "--time")
SLOW = frozenset({"slow-computation", "slow-communication", "slow-mixed"})
ENOUGH = 15
"""Iterations to judge a fault by; the clean job has twice as many."""


@contextmanager
def limited(network: Network) -> Iterator[None]:
    network.link(1).limit(RATE / 20)
    yield
    network.link(1).limit(RATE)


@contextmanager
def delayed(network: Network) -> Iterator[None]:
    network.link(1).impair(delay_s=0.02)
    yield
    network.link(1).impair()


@contextmanager
def lossy(network: Network) -> Iterator[None]:
    _, before = network.link(1).frames()
    network.link(1).impair(loss=0.1)
    yield
    _, after = network.link(1).frames()
    assert after > before
    network.link(1).impair()


@contextmanager
def crowded(network: Network) -> Iterator[None]:
    with network.background(1, 2):
        yield


FAULTS: dict[str, Callable[[Network], AbstractContextManager[None]]] = {
    "limited": limited,
    "delayed": delayed,
    "lossy": lossy,
    "crowded": crowded,
}


def named(verdict: dict[str, Any]) -> str:
    return f"{verdict['class']}: {verdict['summary']} {verdict['evidence']}"


def test_each_fault_shows_in_the_training_job_and_no_slow_network_is_called_a_hang() -> None:
    """Iterations take longer by more than five times the spread of the clean ones; nobody is said to hold the job up."""
    with ExitStack() as stack:
        network = stack.enter_context(Network(hosts=3, rate=RATE))
        job = stack.enter_context(network.job("2.27.5", 4, hosts=(2, 1, 1), shape="training", count=4096, extra=TRAINING))
        watcher = stack.enter_context(live("--no-probes", *pids(job)))
        watcher.wait_for("rank", count=8)
        clean = measure_quiet(job)
        for name, begin in FAULTS.items():
            with begin(network):
                faulty = measure(job, ENOUGH)
            least = statistics.median(clean) + 5 * spread(clean)
            assert statistics.mean(faulty) > least, f"{name}: {faulty} beside {clean}"
        measure(job, ENOUGH)
        job.wait_progress(3)
        told = [data["verdict"] for data in watcher.of("verdict")]
        assert watcher.end() == 0
    assert [named(verdict) for verdict in told if verdict["class"] not in SLOW] == []


CUTS = {
    "one-rank-each": ("allreduce", (1, 1, 1), "nic"),
    "replays": ("graph", (1, 1, 1), "nic"),
    "two-on-one": ("allreduce", (2, 1, 1), "cable"),
    "two-and-two": ("allreduce", (2, 2), "cable"),
    "two-and-two-by-nvlink-replays": ("graph", (2, 2), "cable"),
    # Small messages of many communicators: what was sent is out of NCCL's sight before it has arrived.
    "training": ("training", (2, 1, 1), "cable"),
}
CUT = 1
"""The host that is cut off."""


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.long] * (name != "training")) for name in CUTS])
def test_a_link_that_goes_down_hangs_the_job_and_is_named(layout: str) -> None:
    """Only links with an end on the host that is cut off are named; when it is back, the verdict closes."""
    shape, hosts, where = CUTS[layout]
    extra, count = (TRAINING, 4096) if shape == "training" else ((), 1 << 18)
    with ExitStack() as stack:
        network = stack.enter_context(Network(hosts=len(hosts)))
        links = {"nvlinks": 4, "as_nccl_likes": True} if "nvlink" in layout else {}
        job = stack.enter_context(network.job("2.27.5", sum(hosts), hosts=hosts, shape=shape, count=count, extra=extra, **links))
        watcher = stack.enter_context(live("--no-probes", *pids(job)))
        watcher.wait_for("rank", count=2 * job.ranks)
        assert hangs_told(watcher) == []
        before_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        network.link(CUT).down(where)
        event = watcher.wait_for("link-event", up=False)
        assert event["name"] == network.link(CUT).nic
        # The kernel tells of a lost carrier up to a second late (net/core/link_watch.c), of an interface switched off at once.
        at_most_s = 1 if where == "nic" else 2
        assert before_ns <= event["time_ns"] < before_ns + at_most_s * 1_000_000_000
        verdict = watcher.wait_for("verdict")["verdict"]
        before = [job.progress(rank) for rank in range(job.ranks)]
        check_link_verdict(job, verdict)
        down = f"{network.link(CUT).nic} (netns {event['namespace']}) on"
        assert any(down in line and "is down" in line for line in verdict["evidence"]), named(verdict)
        if layout == "one-rank-each":
            assert verdict["knowledge"][0]["row"] in ("port-down", "path-dead"), verdict["knowledge"]
        assert [job.progress(rank) for rank in range(job.ranks)] == before, "the job was to hang"
        network.link(CUT).up()
        watcher.wait_for("recovery", id=hangs_told(watcher)[-1]["id"])
        job.wait_progress(3)
        assert watcher.end() == 0
    for told in hangs_told(watcher):
        check_link_verdict(job, told)


def measure_quiet(job: Job) -> list[float]:
    """Clean iterations. Other work on the machine widens their spread: then they are measured again, at most three times."""
    found: list[list[float]] = []
    while len(found) < 3 and not (found and spread(found[-1]) < statistics.median(found[-1])):
        found.append(measure(job, 2 * ENOUGH))
    return min(found, key=spread)


def hangs_told(watcher: Live) -> list[dict[str, Any]]:
    verdicts = [data["verdict"] for data in watcher.of("verdict")]
    return [verdict for verdict in verdicts if verdict["class"] not in SLOW]


def check_link_verdict(job: Job, verdict: dict[str, Any]) -> None:
    said = named(verdict)
    assert verdict["class"] == "hardware", said
    assert verdict["culprits"], said
    ranks = {culprit["rank"] for culprit in verdict["culprits"]}
    inside = {rank for rank in range(job.ranks) if job.host(rank) == CUT}
    if verdict["link"] is None:
        assert ranks <= inside, said
        return
    # Of a link both ends are named, or only the one whose port is seen to be down.
    assert ranks & inside, said
    for culprit in verdict["culprits"]:
        link = culprit["link"] or verdict["link"]
        # Ranks of a link are of its communicator, which need not be that of the whole job.
        if culprit["communicator"]["nranks"] == job.ranks:
            ends = {link["source"], link["destination"]}
            assert ends & inside and ends - inside, said
