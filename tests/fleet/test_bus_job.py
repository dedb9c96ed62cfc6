"""A real NCCL job, whose agent and engine know each other only by a nats-server with tenants and TLS (packaging/nats)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fleet.servers import PackagedServer
from testbed.job import Job
from testbed.sidecar import NCCLWATCH, daemon, verdicts

pytestmark = pytest.mark.attach

RANKS, VICTIM = 3, 1


def test_a_frozen_rank_is_named_through_a_server_that_is_killed_meanwhile(tmp_path: Path) -> None:
    server = PackagedServer(tmp_path / "nats")
    tenants = server.folder / "tenants"
    subprocess.run([*NCCLWATCH, "keys", "nats", "--tenant", "red", str(tenants)], check=True, capture_output=True, timeout=60)
    keys = str(server.keys("red"))
    server.start()
    try:
        with (
            daemon("engine", "--bus", server.address, "--keys", keys, "--json") as engine,
            Job("2.27.5", RANKS, "allreduce", "socket", count=20_000, extra=("--pause-us", "50000")) as job,
        ):
            engine.wait(lambda: engine.objects("listening"), "the engine")
            watched = [word for pid in job.pids for word in ("--pid", str(pid))]
            spool = ("--spool", str(tmp_path / "spool"))
            with daemon("agent", "--engine", server.address, "--keys", keys, *watched, *spool) as agent:
                agent.wait_line("connected to NATS server")
                job.freeze(VICTIM)
                engine.wait(lambda: ("stopped", [VICTIM]) in verdicts(engine), "the frozen rank")
                server.kill()
                agent.wait_line("batches are kept")
                server.start()
                agent.wait(lambda: agent.text.count("connected to NATS server") == 2, "the server again")
                job.thaw(VICTIM)
                engine.wait(lambda: engine.objects("recovery"), "the recovery")
                with daemon("top", "--engine", server.address, "--keys", keys, "--json") as top:
                    top.wait(lambda: top.objects("view") or '"rank"' in top.text, "a view")
            assert {rank for _, ranks in verdicts(engine) for rank in ranks} == {VICTIM}
    finally:
        server.kill()
