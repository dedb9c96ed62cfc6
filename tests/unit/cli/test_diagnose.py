"""diagnose: two looks at least, patience before an accusation, one bad process among many, the schema, the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from ncclwatch.cli import main
from ncclwatch.cli.diagnose import settle
from ncclwatch.errors import PrivilegeError, TargetError, TargetGoneError
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass, schema
from unit import fake_targets
from unit.fake_targets import FakeTarget
from unit.synthetic import frozen_ring, moved


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def settled(
    classes: Sequence[VerdictClass], *, wait: float = 5.0, shows_all: bool = True
) -> tuple[list[Verdict], float, list[float]]:
    """What ``settle`` returns when the engine says these classes one after the other; the time it took; patience it asked for."""
    said, patience, clock = list(classes), list[float](), Clock()

    def engine(series: list[Sequence[ProcessSample]], patience_s: float) -> list[Verdict]:
        patience.append(patience_s)
        return [Verdict(said.pop(0) if len(said) > 1 else said[0], "made up")]

    verdicts = settle(engine, list, wait=wait, interval=1.0, shows_all=lambda _: shows_all, clock=clock, sleep=clock.sleep)
    return verdicts, clock.now, patience


@pytest.mark.parametrize("certain", [VerdictClass.RUNNING, VerdictClass.IDLE])
def test_that_nothing_is_wrong_is_said_after_an_interval(certain: VerdictClass) -> None:
    verdicts, seconds, _ = settled([certain])
    assert (verdicts[0].verdict_class, seconds) == (certain, 1.0)


def test_that_nothing_is_open_is_believed_only_of_transports_that_show_it() -> None:
    """GPUs that write to each other directly: a hang looks like rest, and what is not known is said after the whole wait."""
    verdicts, seconds, patience = settled([VerdictClass.IDLE] * 6 + [VerdictClass.UNKNOWN], shows_all=False)
    assert (verdicts[0].verdict_class, seconds, patience[-1]) == (VerdictClass.UNKNOWN, 5.0, 0.0)
    assert settled([VerdictClass.RUNNING], shows_all=False)[1] == 1.0


@pytest.mark.parametrize("certain", [VerdictClass.STOPPED, VerdictClass.DEAD, VerdictClass.ERROR])
def test_a_plain_fact_is_told_after_two_looks_shortly_after_each_other(certain: VerdictClass) -> None:
    verdicts, seconds, _ = settled([certain])
    assert (verdicts[0].verdict_class, seconds) == (certain, 0.2)


def test_progress_in_the_meantime_ends_the_wait() -> None:
    verdicts, seconds, _ = settled([VerdictClass.UNKNOWN] * 3 + [VerdictClass.RUNNING])
    assert (verdicts[0].verdict_class, seconds) == (VerdictClass.RUNNING, 3.0)


def test_standing_still_accuses_only_after_the_wait() -> None:
    verdicts, seconds, patience = settled([VerdictClass.UNKNOWN] * 6 + [VerdictClass.NOT_ENTERED])
    assert (verdicts[0].verdict_class, seconds) == (VerdictClass.NOT_ENTERED, 5.0)
    assert patience == [5.0] * 6 + [0.0], "patience is only dropped when the wait is over"


def test_even_without_a_wait_there_are_two_looks() -> None:
    _, seconds, patience = settled([VerdictClass.UNKNOWN], wait=0.0)
    assert (seconds, patience) == (1.0, [0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("verdict_class", "planes", "seconds"),
    [
        (VerdictClass.HARDWARE, ("state", "wire"), 2.0),
        (VerdictClass.HARDWARE, ("state",), 5.0),
        (VerdictClass.NOT_ENTERED, ("state", "wire"), 5.0),
    ],
)
def test_what_is_stuck_in_an_operation_is_told_as_soon_as_its_requests_are_counted(
    verdict_class: VerdictClass, planes: tuple[str, ...], seconds: float
) -> None:
    """A rank that has not come yet may still come: of that counts say nothing, and it is given the whole wait."""
    clock = Clock()

    def engine(_: list[Sequence[ProcessSample]], patience_s: float) -> list[Verdict]:
        return [Verdict(verdict_class if patience_s == 0 else VerdictClass.UNKNOWN, "made up", planes=planes)]

    counted = lambda: clock.now >= 2.0  # noqa: E731
    verdicts = settle(engine, list, wait=5.0, interval=1.0, counted=counted, clock=clock, sleep=clock.sleep)
    assert (verdicts[0].verdict_class, clock.now) == (verdict_class, seconds)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("ncclwatch.cli.diagnose.time.sleep", lambda _seconds: None)
    monkeypatch.setattr("ncclwatch.collect.counting.WorkCount.rest", lambda _self, _seconds: None)

    def go(*arguments: str) -> tuple[int, str, str]:
        status = main.run(["diagnose", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return go


def test_a_stopped_rank_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_targets.install(monkeypatch, fake_targets.still(frozen_ring(2)))
    status, out, err = run("--pid", "1000,1001", "--pid", "1002", "1003")
    assert (status, err) == (0, "")
    assert out.startswith("STOPPED  ")
    assert "culprit    rank 2  host node2  pid 1002  GPU 0" in out
    assert "waiting    ranks 0-1, 3" in out


def test_why_shows_what_led_there_and_what_was_weighed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_targets.install(monkeypatch, fake_targets.still(frozen_ring(2)))
    assert "stands by rule halted" not in run("--all")[1]
    out = run("--all", "--why")[1]
    evidence, _, trail = out.partition("\n  why\n")
    assert "rank 2 (node2, pid 1002) is stopped" in evidence
    assert "seen: the evidence above" in trail
    assert "is stopped (state T)" not in trail, "what stands above is not told twice"
    why = trail[trail.index("    stands by rule halted\n") :].splitlines()
    assert why[1].startswith("      because: State T or t in /proc/PID/stat")
    assert why[2] == "      - stopped: rank 2: its process is stopped by a signal (confidence 99%)"
    verdict = json.loads(run("--all", "--json")[1])
    assert verdict["rules"] == ["halted"]
    assert verdict["trail"][-1] == {
        "kind": "stands", "rule": "halted", "against": "",
        "text": "stopped: rank 2: its process is stopped by a signal (confidence 99%)",
    }  # fmt: skip


def test_exit_code_on_demand(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_targets.install(monkeypatch, fake_targets.still(frozen_ring(2)))
    assert run("--all", "--exit-code")[0] == 10


def test_a_running_job_accuses_nobody(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = fake_targets.still(frozen_ring(2, run_state="S"), count=2)
    for target in targets.values():
        assert isinstance(target, FakeTarget)
        last = target.looks[-1]
        assert isinstance(last, ProcessSample)
        target.looks[-1] = moved(last)
    fake_targets.install(monkeypatch, {**targets, 4711: PrivilegeError("closed", "run as root")})
    status, out, err = run("--pid", ",".join(map(str, [*targets, 4711])), "--exit-code")
    assert status == 0
    assert out.startswith("RUNNING  ")
    assert "culprit" not in out
    assert "4711" in err and "closed" not in out, "it explains nothing here"


def test_json_fits_the_committed_schema(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_targets.install(monkeypatch, fake_targets.still(frozen_ring(1)))
    _, out, _ = run("--all", "--json")
    verdict = json.loads(out)
    jsonschema.validate(verdict, schema())
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [1]


def test_one_process_that_cannot_be_read_is_a_line_and_the_rest_goes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = fake_targets.still(frozen_ring(2))
    targets[1000] = PrivilegeError("not allowed to read the memory of process 1000", "run as root")
    fake_targets.install(monkeypatch, targets)
    status, out, err = run("--pid", "1000,1001,1002,1003")
    assert status == 0
    assert "rank 2" in out.splitlines()[1]
    line = "pid 1000: not allowed to read the memory of process 1000: run as root"
    assert err == f"ncclwatch: {line}\n"
    assert line in json.loads(run("--pid", "1000,1001,1002,1003", "--json")[1])["unobserved"]


def test_a_process_that_ends_between_two_looks_counts_as_dead(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = fake_targets.still(frozen_ring(2, run_state="S"))
    victim = targets[1002]
    assert isinstance(victim, FakeTarget)
    victim.looks = [victim.looks[0], TargetGoneError("process 1002 exited", "look again")]
    fake_targets.install(monkeypatch, targets)
    status, out, _ = run("--all", "--json", "--exit-code")
    verdict = json.loads(out)
    assert (status, verdict["class"]) == (10, "dead")
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [2]
    assert victim.closed


def test_when_nothing_can_be_read_privilege_is_what_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_targets.install(
        monkeypatch, {11: TargetError("no NCCL in 11", "choose another"), 12: PrivilegeError("closed", "be root")}
    )
    status, out, err = run("--pid", "11,12")
    assert (status, out) == (4, "")
    assert err == "ncclwatch: error: none of 2 targets could be read; closed: be root\n"


def test_a_node_without_nccl_processes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_targets.install(monkeypatch, {})
    status, _, err = run("--all")
    assert status == 3
    assert "no NCCL process" in err


def test_a_damaged_file_among_good_ones_is_a_line(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.snap", tmp_path / "bad.snap"
    for file in (good, bad):
        file.write_bytes(b"x")

    def load(path: Path) -> list[list[ProcessSample]]:
        if path == bad:
            raise TargetError(f"{path} is damaged", "record it again")
        return [rank.looks(2) for rank in frozen_ring(3)]

    monkeypatch.setattr("ncclwatch.target.image.load_snapshot", load)
    status, out, err = run(str(good), str(bad), "--json")
    assert status == 0
    assert [culprit["rank"] for culprit in json.loads(out)["culprits"]] == [3]
    assert err == f"ncclwatch: {bad} is damaged: record it again\n"


def test_two_jobs_get_a_verdict_each_the_worse_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = fake_targets.still(frozen_ring(2))
    for pid, target in fake_targets.still(frozen_ring(0, run_state="S")).items():
        assert isinstance(target, FakeTarget)
        target.looks = [_other_job(look, pid + 100) for look in target.looks if isinstance(look, ProcessSample)]
        target.looks[-1] = moved(target.looks[-1])  # type: ignore[arg-type]
        target.info = target.looks[0].process  # type: ignore[union-attr]
        targets[pid + 100] = target
    fake_targets.install(monkeypatch, targets)
    _, out, _ = run("--all")
    assert out.index("STOPPED") < out.index("RUNNING")


def _other_job(sample: ProcessSample, pid: int) -> ProcessSample:
    info = replace(sample.process, key=replace(sample.process.key, pid=pid))
    communicators = tuple(replace(c, hash=0xB2) for c in sample.communicators)
    operations = tuple(replace(o, comm_hash=0xB2) for o in sample.operations)
    return replace(sample, process=info, communicators=communicators, operations=operations)
