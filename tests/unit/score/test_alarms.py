"""Hours of healthy jobs: they are drawn, run for as long as was asked, and every stretch that accuses is an alarm."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import Fault, FaultKind, LookalikeKind, _check
from score import alarms, real_hours
from score.alarms import HOSTS_AHEAD, SIMULATED, Healthy, _healthy, chosen, main, played, simulated, table
from score.archive import Accusation, Stretch, Timeline
from score.drawn import draw_healthy
from score.real import obstacle
from score.real_hours import BYTES, FEW, TRANSPORTS, drawn


def test_drawn_healthy_jobs_are_valid_varied_and_run_for_as_long_as_asked() -> None:
    jobs = [draw_healthy(5, number, 120.0) for number in range(40)]
    for job in jobs:
        _check(job, job.name)
        assert not job.faults and job.expect.score_class.quiet
    assert jobs == [draw_healthy(5, number, 120.0) for number in range(40)]
    assert {event.kind for job in jobs for event in job.lookalikes} == set(LookalikeKind)
    assert 10 < sum(not job.lookalikes for job in jobs) < 30
    for job in jobs[:3]:
        assert 60 < simulate(job).end < 600


ACCUSED = (Accusation("slow-computation", (1,)),)


def test_a_stretch_that_accuses_is_one_alarm_whoever_it_names() -> None:
    other = (Accusation("slow-computation", (2,)),)
    looks = Timeline(5, (
        Stretch(0, 1, quiet="running"), Stretch(2, 3, ACCUSED), Stretch(4, 5, other), Stretch(6, 7, quiet="running"),
        Stretch(8, 9, ACCUSED),
    ))  # fmt: skip
    one = _healthy("a job", SIMULATED, 0.5, looks, 1.0)
    assert one.alarms == 2 and len(one.said) == 3
    assert _healthy("a job", SIMULATED, 0.5, Timeline(1, (Stretch(0, 9, quiet="running"),)), 1.0).alarms == 0


def test_the_table_gives_the_exact_bound_and_keeps_real_and_simulated_apart() -> None:
    silent = [Healthy(name, SIMULATED, 1500.0, 0, ()) for name in "ab"]
    text = table([*silent, Healthy("c", "real", 2.0, 1, ("x",))], markdown=True)
    assert "| simulated | 2 | 3000.00 | 0 | 0 | 0 | 0.0010 |" in text
    assert "| real | 1 | 2.00 | 0 | 1 | 1 | 2.3719 |" in text


def test_a_simulated_job_is_judged_at_every_look() -> None:
    one = simulated(1, 1, 60.0)
    assert one.source == SIMULATED and 0.005 < one.hours < 0.1 and one.cpu_s > 0
    assert one.looks > 0.9 * 3600 * one.hours


def test_a_job_that_is_not_healthy_does_not_pass_for_one() -> None:
    job = draw_healthy(5, 1, 60.0)
    slow = Fault(FaultKind.SLOW_GPU, 1, start_s=20.0, strength=4.0)
    assert played(job).alarms == 0 and played(replace(job, faults=(slow,))).alarms >= 1


def test_real_jobs_are_drawn_that_fit_beside_each_other_and_can_be_played() -> None:
    jobs = [*islice(drawn(5, 600.0, 2.0, 30.0, ["2.25.1", "2.29.2"]), 8)]
    assert {(nccl, transport) for _, nccl, transport in jobs} == {(v, t) for v in ("2.25.1", "2.29.2") for t in TRANSPORTS}
    for scenario, nccl, transport in jobs:
        assert scenario.layout.world <= FEW and scenario.workload.dp_bytes <= BYTES
        assert 2.0 <= 600.0 / scenario.workload.iterations <= 30.0
        assert not obstacle(scenario, nccl, transport)


def test_jobs_with_short_iterations_may_be_left_out() -> None:
    def iterations(least_s: float) -> list[int]:
        return [draw_healthy(5, number, 600.0).workload.iterations for number in islice(chosen(5, 3, 600.0, least_s), 16)]

    assert [*islice(chosen(5, 3, 600.0, 0.0), 4)] == [3, 4, 5, 6]
    assert max(iterations(2.0)) <= 300 < max(iterations(0.0)), "600 s of iterations of 2 s and more"


def test_the_command_adds_up_what_others_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, other = tmp_path / "a.json", tmp_path / "b.json"
    for path in (file, other):
        path.write_text(
            json.dumps({"jobs": [{"name": "a", "source": "real", "hours": 3.0, "alarms": 0, "said": [], "cpu_s": 0}]})
        )
    assert main(["--pool", str(file), str(other)]) == 0
    assert "6.00" in capsys.readouterr().out


def test_jobs_that_cannot_be_drawn_are_not_searched_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--hours", "1", "--job-seconds", "60", "--iteration", "20"])
    assert "the fewest of a job, take" in capsys.readouterr().err


def test_hosts_are_ahead_of_their_gpus_by_few_operations_and_by_many(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = list[int]()
    monkeypatch.setattr(alarms, "played", lambda job, _: ahead.append(job.workload.host_ahead))
    for number in range(6):
        simulated(1, number, 60.0)
    assert ahead == [*HOSTS_AHEAD, *HOSTS_AHEAD]


def test_more_real_jobs_than_there_is_memory_for_are_not_begun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["score.real_hours", "--jobs", "100000"])
    with pytest.raises(SystemExit):
        real_hours.main()
    assert "--jobs: at most" in capsys.readouterr().err
