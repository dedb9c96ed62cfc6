"""SIGKILL of agent, engine, both, at random moments: the job never notices, and what the ledger misses is stated.

A few rounds; NCCLWATCH_KILLS=50 for as many as one wants (NCCLWATCH_SEED chooses the moments).
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from pathlib import Path

import pytest

from testbed.job import Job
from testbed.sidecar import Daemon, daemon, free_port, make_keys, verdicts
from testbed.watcher import pids

pytestmark = pytest.mark.attach

ROUNDS = int(os.environ.get("NCCLWATCH_KILLS", "3"))
SEED = int(os.environ.get("NCCLWATCH_SEED", "8"))


def totals(viewer: Daemon) -> dict[int, int]:
    """Operations of each rank as the newest windows tell."""
    return {data["rank"]: data["operations"] for data in viewer.objects("rank")}


def standstills(engine: Daemon) -> list[tuple[str, list[int | None]]]:
    """Verdicts told of standstills: this machine may well be slow while programs start and end on it."""
    return [(what, ranks) for what, ranks in verdicts(engine) if not what.startswith("slow-")]


def knows(engine: Daemon) -> bool:
    """Whether an engine has heard of all four ranks."""
    summaries = engine.objects("summary")
    return bool(summaries) and summaries[-1]["ranks"] == 4


def test_whoever_is_killed_the_job_never_notices_and_nothing_is_lost_in_silence(tmp_path: Path) -> None:
    source = random.Random(SEED)
    keys, address = make_keys(tmp_path / "keys"), f"tcp://127.0.0.1:{free_port()}"
    secret = ("--keys", str(keys))
    rebuilt, began = [], time.monotonic()
    engine_words = ("engine", "--bind", address, *secret, "--json")
    with Job(ranks=4, count=1 << 12, verify=True, extra=("--pause-us", "20000")) as job:
        agent_words = (
            "agent",
            "--engine",
            address,
            *secret,
            *pids(job),
            "--spool",
            str(tmp_path / "s"),
        )
        engine, agent = Daemon(*engine_words), Daemon(*agent_words)
        try:
            engine.wait_line("listening")
            agent.wait_line("connected to engine")
            for turn in range(ROUNDS):
                time.sleep(source.uniform(0.0, 1.5))
                victims = source.choice([("agent",), ("engine",), ("agent", "engine")]) if turn > 2 else (
                    ("agent",), ("engine",), ("agent", "engine"))[turn]  # fmt: skip
                for name in victims:
                    (agent if name == "agent" else engine).end(signal.SIGKILL)
                # The job goes on while nobody watches.
                job.wait_progress(2)
                if "engine" in victims:
                    engine = Daemon(*engine_words)
                    engine.wait_line("listening")
                    began = time.monotonic()
                if "agent" in victims:
                    agent = Daemon(*agent_words)
                    agent.wait_line("connected to engine")
                    # What nobody saw is stated, by the agent and to the engine.
                    agent.wait_line("no agent ran here for")
                    engine.wait_line("no agent ran here for")
                engine.wait(lambda e=engine: knows(e), f"round {turn}: the engine knows the job again")  # type: ignore[misc]
                if victims == ("engine",):
                    rebuilt.append(time.monotonic() - began)
                assert all(job.alive(rank) for rank in range(4))
            print(
                f"engines rebuilt from the agent's word: median {statistics.median(rebuilt):.1f} s, at most {max(rebuilt):.1f} s"
            )
            # After all of it a frozen rank is still named, and no verdict was told before that.
            job.freeze(1)
            engine.wait(lambda: standstills(engine), "the verdict")
            assert standstills(engine) == [("stopped", [1])]
            job.thaw(1)
            job.wait_progress(3)
            for rank in range(4):
                assert not [line for line in job.lines(rank) if line.startswith("wrong")]
        finally:
            agent.end()
            engine.end()


def test_without_an_engine_an_agent_waits_and_sends_all_of_it_later(tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    # It begins when the agent is there: of calls under way while probes come, one rank's may be seen and the other's not.
    extra = ("--pause-us", "20000", "--gate")
    with Job(ranks=2, count=1 << 12, hold=True, iterations=200, extra=extra, wait_for="nothing") as job:
        job.wait_gate()
        words = (*pids(job), "--spool", str(tmp_path / "s"))
        with daemon("agent", "--engine", address, *words) as agent:
            agent.wait_line("watching 2 processes")
            job.open_gate()
            for rank in range(2):
                job.wait_line(rank, "holding after 200 iterations")
            with daemon("engine", "--bind", address, "--json") as engine:
                engine.wait_line("listening")
                with daemon("top", "--engine", address, "--json") as viewer:
                    viewer.wait(
                        lambda: len(set(totals(viewer).values())) == 1 and min(totals(viewer).values(), default=0) > 0, "both"
                    )
                    assert engine.objects("loss") == []
                    assert viewer.objects("rank")[-1]["rate_plane"] == "calls"
