"""What is said of real jobs that leave their link empty, and that following it gains about what was said.

Links are token buckets in network namespaces; ``--link`` says what they carry. A limit for each flow, as clouds have, is played
by pacing the job's sockets from outside. All is so slow that the machine's own speed matters little.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from testbed.job import Job
from testbed.netns import Network
from testbed.watcher import pids, run

pytestmark = [
    pytest.mark.attach, pytest.mark.paced, pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs"),
]  # fmt: skip

LINK = 8_000_000
"""Bytes a second."""
TOLD = "64mbit"
PACE = 1_000_000
COUNT = 1 << 18
PIDFD_GETFD = 438
SO_MAX_PACING_RATE = 47


@contextmanager
def playing(
    *,
    hosts: tuple[int, ...] = (1, 1),
    paced: bool = False,
    count: int = COUNT,
    shape: str = "allreduce",
    **more: Any,
) -> Iterator[Job]:
    with (
        Network(hosts=len(hosts), rate=LINK) as network,
        network.job("2.27.5", ranks=sum(hosts), hosts=hosts, shape=shape, count=count, **more) as job,
    ):
        if paced:
            assert sum(pace(pid) for pid in job.pids)
        job.wait_progress(2)
        yield job


def pace(pid: int) -> int:
    """Limit each TCP socket of a process, from outside; how many there were."""
    process, found = os.pidfd_open(pid), 0
    for name in Path(f"/proc/{pid}/fd").iterdir():
        descriptor = ctypes.CDLL(None).syscall(PIDFD_GETFD, process, int(name.name), 0)
        if descriptor < 0:
            continue
        if not str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("socket:"):
            os.close(descriptor)
            continue
        with socket.socket(fileno=descriptor) as one:
            if (one.family, one.type) == (socket.AF_INET, socket.SOCK_STREAM):
                one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, PACE)
                found += 1
    os.close(process)
    return found


def told(job: Job, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("tuning", *pids(job), "--json", "--duration", "8", *words).stdout)
    return found


def advice(found: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Rule → how many times as fast, over all links at least and at most."""
    rules: dict[str, tuple[float, float]] = {}
    for one in (one for link in found["links"] for one in link["advice"]):
        low, high = rules.get(one["rule"], one["faster"])
        rules[one["rule"]] = min(low, one["faster"][0]), max(high, one["faster"][1])
    return rules


def speed(found: dict[str, Any]) -> float:
    """AllReduces a second, by NCCL's own count."""
    return float(max(one["operations"] for one in found["communicators"]) / found["looked_s"])


@pytest.mark.long
def test_one_connection_on_a_link_for_eight_and_more_channels_gain_what_was_said() -> None:
    with playing(paced=True, env={"NCCL_MAX_NCHANNELS": "1"}) as job:
        found = told(job, "--link", TOLD)
    assert found["exposure"] == "bound"
    assert all(link["fill"] < 0.2 for link in found["links"])
    low, high = advice(found)["connections"]
    assert advice(found).keys() == {"connections"}
    assert 5 < low <= high <= 8
    assert "NCCL_MAX_NCHANNELS=1" in found["links"][0]["advice"][0]["change"]
    with playing(paced=True, env={"NCCL_MIN_NCHANNELS": "8"}) as job:
        after = told(job, "--link", TOLD)
    assert low * 0.6 < speed(after) / speed(found) < high * 1.4


@pytest.mark.long
def test_flags_on_a_full_link_and_another_protocol_gains_what_was_said() -> None:
    with playing(protocol="LL") as job:
        known, blind = told(job, "--link", TOLD), told(job)
    low, high = advice(known)["protocol"]
    assert advice(known).keys() == {"protocol"}
    assert 1.15 < low < high <= 2.01
    assert all(link["fill"] is None for link in blind["links"])
    with playing() as job:
        after = told(job, "--link", TOLD)
    # It may gain more than was said: a protocol without flags also fills the link better.
    assert speed(after) / speed(known) > low * 0.9
    assert "connections" not in advice(after)


def test_a_ring_between_two_hosts_and_a_tree_gains_what_was_said() -> None:
    with playing(hosts=(2, 2)) as job:
        found = told(job, "--link", TOLD)
    low, high = advice(found)["two-hosts"]
    assert 1.1 < low <= high < 1.51
    with playing(hosts=(2, 2), algorithm="Tree") as job:
        after = told(job, "--link", TOLD)
    assert "two-hosts" not in advice(after)
    assert low * 0.85 < speed(after) / speed(found) < high * 1.25


@pytest.mark.quiet  # Others on the machine make a job that computes wait for its peers.
def test_nothing_is_said_of_a_job_that_computes_most_of_the_time() -> None:
    """Its links are empty, and its connections have nothing to send.

    How full a link is while operations move says nothing here: they are short, and a token bucket passes so little at once.
    """
    training = ("--gradients", "16384", "--forward-us", "60000")
    with playing(shape="training", count=1024, extra=training) as job:
        found = told(job, "--link", TOLD)
    assert found["exposure"] != "bound"
    assert not advice(found)
    assert all(link["rate_moving"] * link["moving"] < LINK / 2 for link in found["links"])
