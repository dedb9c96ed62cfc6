"""Who failed first in a job of three hosts that comes down, by its agents and one engine, after its processes are gone."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from testbed.job import Job
from testbed.netns import Network
from testbed.sidecar import Daemon, daemon, make_keys

pytestmark = [pytest.mark.attach]

PORT = 17404
ABORTED = 3
"""The status with which the testbed's watchdog ends a process."""


class Cluster:
    def __init__(self, job: Job, engine: Daemon, asked: Path) -> None:
        self.job, self.engine, self._asked = job, engine, asked

    def after(self) -> dict[str, Any]:
        """The verdict once no process is left."""
        self.job.wait(120)
        self.engine.wait(lambda: any(len(failed(verdict)) == self.job.ranks for verdict in self.told()), "every end")
        before = len(self.engine.objects("answer"))
        self.engine.wait(lambda: len(self.engine.ask(self._asked)) > before, "an answer")
        verdict: dict[str, Any] = self.engine.objects("answer")[-1]["verdict"]
        return verdict

    def told(self) -> list[dict[str, Any]]:
        return [data["verdict"] for data in self.engine.objects("verdict")]


def failed(verdict: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """How each rank ended. A look may find a process gone before its end is heard of: until then it is not said how ("ended").

    The kernel's log, which all of the machine share, may tell of processes of other tests as well.
    """
    ends = ("signal", "exit", "memory")
    return {one["rank"]: one for one in verdict["failures"] if one["rank"] is not None and one["kind"] in ends}


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The parameter: further options of the job."""
    keys, asked = make_keys(tmp_path / "keys"), tmp_path / "ask"
    asked.touch()
    with ExitStack() as stack:
        network = stack.enter_context(Network(hosts=3, rails=2, containers=True))
        address = f"tcp://10.78.1.254:{PORT}"
        options = ("--bind", address, "--keys", str(keys), "--json", "--ask-file", str(asked))
        engine = stack.enter_context(daemon("engine", *options, enter=network.switch.enter))
        engine.wait_line("listening")
        more = ("--pause-us", "50000", *request.param)
        job = stack.enter_context(network.job(ranks=6, hosts=(2, 2, 2), extra=more, env={"NCCL_SOCKET_IFNAME": "nic0"}))
        for host in network.hosts:
            agent = stack.enter_context(daemon("agent", "--engine", address, "--keys", str(keys), "--all", enter=host.enter))
            agent.wait_line("watching 2 processes")
        made = Cluster(job, engine, asked)

        def all_known() -> bool:
            said = engine.ask(asked)
            return bool(said) and not any("ranks were not observed" in line for line in said[-1]["unobserved"])

        engine.wait(all_known, "an answer about all ranks")
        yield made


def has_line(cluster: Cluster, begin: str) -> bool:
    """Whether the evidence of any verdict so far has a line that begins so."""
    return any(line.startswith(begin) for verdict in cluster.told() for line in verdict["evidence"])


@pytest.mark.long
@pytest.mark.parametrize("cluster", [("--watchdog", "12")], indirect=True)
def test_a_rank_is_killed_and_the_watchdogs_of_the_others_end_them(cluster: Cluster) -> None:
    job = cluster.job
    job.kill(3)
    verdict = cluster.after()
    assert (verdict["class"], [one["rank"] for one in verdict["culprits"]]) == ("dead", [3]), verdict
    ends = failed(verdict)
    assert (ends[3]["place"], ends[3]["kind"], ends[3]["code"]) == ("first", "signal", signal.SIGKILL)
    for rank in (0, 1, 2, 4, 5):
        assert (ends[rank]["place"], ends[rank]["kind"], ends[rank]["code"]) == ("followed", "exit", ABORTED), ends[rank]
        # The watchdog looks every twelve seconds, and an iteration that began before the kill may have been looked at once.
        assert ends[rank]["after_s"] > 1.0 > (ends[rank]["error_s"] or 0.0), ends[rank]
    assert {one["host"] for one in ends.values()} == {"host0", "host1", "host2"}
    assert sorted(ends[rank]["time"] for rank in ends)[0] == ends[3]["time"]
    assert verdict["culprits"][0]["ticket"] is not None, "what a ticket needs is kept after the process is gone"


@pytest.mark.parametrize("cluster", [("--watchdog", "25")], indirect=True)
def test_a_rank_that_hangs_stays_named_when_the_watchdogs_end_the_job(cluster: Cluster) -> None:
    job, engine = cluster.job, cluster.engine
    job.freeze(4)
    engine.wait(lambda: any(verdict["class"] == "stopped" for verdict in cluster.told()), "the frozen rank")
    # What it does is looked at on its node and told with the verdict; so is what one of those that wait does, whose node may
    # answer later.
    for begin in ("rank 4 is stopped by a signal: main thread stopped", "meanwhile rank "):
        engine.wait(partial(has_line, cluster, begin), begin)
    # Its own watchdog is frozen with it: somebody ends it once the others are gone.
    engine.wait(lambda: [job.alive(rank) for rank in range(6)].count(True) == 1, "the watchdogs", 120)
    job.kill(4)
    verdict = cluster.after()
    assert (verdict["class"], [one["rank"] for one in verdict["culprits"]]) == ("stopped", [4]), verdict
    ends = failed(verdict)
    assert ends[4]["place"] == "followed", ends
    assert all(ends[rank]["code"] == ABORTED for rank in (0, 1, 2, 3, 5)), ends
