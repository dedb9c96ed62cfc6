"""The commands on a real job, as a user runs them: what they print, how they end, and that the job is none the worse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import jsonschema
import pytest

from ncclwatch.model.verdict import schema
from testbed.job import Job
from testbed.watcher import NCCLWATCH, live, pids, run

pytestmark = pytest.mark.attach

PAUSE = ("--pause-us", "20000")


@pytest.mark.parametrize("version", ["2.21.5", "2.27.5", "2.32.3"])
def test_a_frozen_rank_is_named_and_its_recovery_told(version: str) -> None:
    with Job(nccl=version, ranks=4, count=1 << 14, extra=PAUSE) as job, live("--exit-code", *pids(job)) as watcher:
        attached = watcher.wait_for("attached")
        assert {tuple(process["version"]) for process in attached["processes"]} == {tuple(map(int, version.split(".")))}
        assert attached["planes"]["calls"] == {"running": True, "reason": ""}
        watcher.wait_for("rank", count=8)
        job.freeze(2)
        verdict = watcher.wait_for("verdict")["verdict"]
        jsonschema.validate(verdict, schema())
        assert [(c["rank"], c["pid"]) for c in verdict["culprits"]] == [(2, job.pid(2))]
        job.thaw(2)
        watcher.wait_for("recovery", id=verdict["id"])
        job.wait_progress(3)
        assert watcher.end() == 0
        end = watcher.of("end")[0]
        assert (end["reason"], end["lost"], end["verdict"]) == ("interrupted", 0, None)
        assert all(job.alive(rank) for rank in range(4))


def test_the_status_is_10_when_the_verdict_stands_at_the_end() -> None:
    with Job(ranks=2, count=1 << 14, extra=PAUSE) as job, live("--exit-code", *pids(job)) as watcher:
        watcher.wait_for("rank", count=2)
        job.freeze(1)
        watcher.wait_for("verdict")
        assert watcher.end(signal.SIGTERM) == 10
        assert watcher.of("end")[0]["verdict"]["culprits"][0]["rank"] == 1


def test_every_call_is_told_once_and_counted_in_the_windows() -> None:
    operations = 23
    with Job(ranks=2, count=1000, iterations=operations, hold=True, extra=("--gate",), wait_for="nothing") as job:
        job.wait_gate()  # so nothing is missed on a slow machine
        with live("--calls", *pids(job)) as watcher:
            watcher.wait_for("attached")
            job.open_gate()
            for rank in range(2):
                job.wait_line(rank, f"iteration {operations}")
            watcher.wait_for("rank", rank=0, operations=operations)
            watcher.wait_for("rank", rank=1, operations=operations)
            assert watcher.end() == 0
        calls = [call for call in watcher.of("call") if call["function"] == "AllReduce" and call["kind"] == "enter"]
        assert sorted(call["comm_rank"] for call in calls) == [0] * operations + [1] * operations
        assert {(call["count"], call["nranks"]) for call in calls} == {(1000, 2)}
        assert len({call["comm_hash"] for call in calls}) == 1
        assert watcher.of("loss") == []
        inits = [call for call in watcher.of("call") if call["function"].startswith("CommInit") and call["kind"] == "leave"]
        assert {call["result"] for call in inits} == {0}


def test_rates_and_bytes_are_those_of_the_job() -> None:
    with Job(ranks=2, count=1 << 12, extra=("--pause-us", "50000")) as job, live(*pids(job)) as watcher:
        watcher.wait_for("rank", count=2 * 6)
        window = watcher.of("rank")[-1]
        assert window["rate_plane"] == "calls"
        assert 0 < window["operations_per_s"] < 20, "an iteration takes at least its pause of 50 ms"
        assert window["bytes_per_s"] == pytest.approx(window["operations_per_s"] * (4 << 12))
        assert window["last_call"]["nbytes"] == 4 << 12


def test_a_rank_that_is_killed_is_told_and_named() -> None:
    with Job(ranks=4, count=1 << 14, extra=PAUSE) as job, live("--exit-code", *pids(job)) as watcher:
        watcher.wait_for("rank", count=4)
        job.kill(1)
        watcher.wait_for("process", change="exited", pid=job.pids[1])
        verdict = watcher.wait_for("verdict")["verdict"]
        assert verdict["class"] == "dead"
        assert [culprit["rank"] for culprit in verdict["culprits"]] == [1], "not a victim beside it"
        assert watcher.end() == 10


def test_a_job_that_ends_ends_the_session_without_a_verdict() -> None:
    extra = ("--pause-us", "50000", "--gate")
    with Job(ranks=2, count=1 << 12, iterations=60, extra=extra, wait_for="nothing") as job, live(*pids(job)) as watcher:
        watcher.wait_for("attached")
        job.open_gate()
        watcher.wait_for("rank", count=4)
        end = watcher.wait_for("end", timeout=120)
        assert watcher.child.wait(30) == 0
        assert end["reason"] == "every watched process has ended"
        assert watcher.of("verdict") == []
        assert sorted(o["pid"] for o in watcher.of("process")) == sorted(job.pids)


def test_with_all_a_job_that_starts_later_is_taken_up() -> None:
    with Job(ranks=1, shape="idle") as first, live("--all") as watcher:
        assert first.pid(0) in {process["pid"] for process in watcher.wait_for("attached")["processes"]}
        with Job(ranks=2, count=1 << 12, extra=PAUSE) as second:
            for pid in second.pids:
                watcher.wait_for("process", change="started", pid=pid)
                watcher.wait_for("rank", pid=pid, count=2)
        for pid in second.pids if second.pids else []:
            watcher.wait_for("process", change="exited", pid=pid)
        assert watcher.end() == 0


def test_the_job_does_not_notice() -> None:
    with Job(ranks=4, count=1 << 12, iterations=400, hold=True, verify=True, extra=PAUSE) as job:
        for _ in range(3):
            with live(*pids(job)) as watcher:
                watcher.wait_for("rank", count=4)
                assert watcher.end() == 0
            assert run("dump", *pids(job)).returncode == 0
        for rank in range(4):
            job.wait_line(rank, "holding after 400 iterations", timeout=120)
            assert not [line for line in job.lines(rank) if line.startswith("wrong")]


def test_the_log_for_people() -> None:
    with Job(ranks=2, count=1 << 12, extra=PAUSE) as job:
        job.freeze(0)
        done = run("attach", *pids(job), "--duration", "4", "--exit-code")
        assert done.returncode == 10
        lines = done.stdout.splitlines()
        assert "attached to 2 processes, ranks 0-1, NCCL 2.27.5; planes: state, calls" in lines[0]
        assert any("STOPPED  rank 0" in line for line in lines)
        assert "end: duration over; verdict stands: rank 0" in lines[-1]


def test_without_privileges_one_line_says_what_is_missing() -> None:
    with Job(ranks=1, shape="idle") as job:
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
        done = subprocess.run(
            [*nobody, *NCCLWATCH, "diagnose", "--pid", str(job.pid(0))],
            capture_output=True, text=True, check=False, timeout=60, cwd="/",
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent"},
        )  # fmt: skip
        assert done.returncode == 4, done.stderr
        assert done.stderr.count("\n") == 1
        assert "CAP_SYS_PTRACE" in done.stderr


def test_without_probes_memory_alone_shows_the_job() -> None:
    with Job(ranks=2, count=1 << 14, extra=PAUSE) as job, live("--no-probes", *pids(job)) as watcher:
        assert watcher.wait_for("attached")["planes"]["calls"] == {"running": False, "reason": "switched off"}
        watcher.wait_for("rank", count=8)
        window = watcher.of("rank")[-1]
        assert window["rate_plane"] == "state"
        assert window["operations_per_s"] > 0
        assert watcher.end() == 0


def test_dump_diagnose_and_snapshot_of_a_hung_job(tmp_path: Path) -> None:
    with Job(ranks=4, count=1 << 16) as job:
        job.freeze(3)
        live_verdict = json.loads(run("diagnose", *pids(job), "--json").stdout)
        jsonschema.validate(live_verdict, schema())
        assert [culprit["rank"] for culprit in live_verdict["culprits"]] == [3]
        dumped = json.loads(run("dump", *pids(job), "--json").stdout)
        assert [process["process"]["rank"] for process in dumped["processes"]] == [0, 1, 2, 3]
        assert [process["run_state"] == "T" for process in dumped["processes"]] == [False, False, False, True]
        file = tmp_path / "hung.snap"
        assert run("snapshot", *pids(job), "-o", str(file)).returncode == 0
    recorded = run("diagnose", str(file), "--json", "--exit-code")
    assert recorded.returncode == 10
    assert [culprit["rank"] for culprit in json.loads(recorded.stdout)["culprits"]] == [3]
    text = run("dump", str(file)).stdout
    assert text.count("rank 3/4") == 1
    assert "stopped" in text


def test_doctor_says_all_is_well_and_knows_every_site() -> None:
    with Job(ranks=1, shape="idle") as job:
        done = run("doctor", "--pid", str(job.pid(0)), "--json")
        report = json.loads(done.stdout)
        assert (done.returncode, report["status"]) == (0, 0)
        sites = [finding["data"] for finding in report["processes"] if "cost_class" in finding["data"]]
        assert {"ncclAllReduce", "ncclSend", "ncclGroupEnd", "ncclCommInitRankConfig"} <= {site["function"] for site in sites}
        assert all(site["instruction"] for site in sites)


def test_ps_lists_the_ranks() -> None:
    with Job(ranks=2, shape="idle") as job:
        listed = {process["pid"]: process for process in json.loads(run("ps", "--json").stdout)}
        for rank, pid in enumerate(job.pids):
            assert (listed[pid]["rank"], listed[pid]["world_size"], listed[pid]["version"]) == (rank, 2, [2, 27, 5])
