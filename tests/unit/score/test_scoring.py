"""The scorer: what counts as right, and that a diagnoser gets records and nothing else."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.model.verdict import CommunicatorRef, Culprit, LinkRef, Verdict, VerdictClass
from ncclwatch.simulate.observe import Cast
from ncclwatch.simulate.scenario import Scenario, ScoreClass, parse
from ncclwatch.simulate.wire import RecordSet
from score.__main__ import main
from score.baselines import all_baselines
from score.cases import Case
from score.diagnosers import Ncclwatch, rounds
from score.scoring import judge, score_case, summarise, to_json
from score.table import SIMULATED, render


def make(faults: list[dict[str, Any]] | None = None, expect: dict[str, Any] | None = None, **tables: Any) -> Scenario:
    data: dict[str, Any] = {"name": "t", "title": "t", "seed": 3, "layout": {"tp": 2, "pp": 2, "dp": 2, "ranks_per_node": 4}}
    data["workload"] = {"iterations": 20}
    data["network"] = {"intra_node": "net"}
    data["observe"] = {"planes": ["calls", "state", "timing"]}
    data |= tables
    data["faults"] = faults or []
    data["expect"] = expect or {"score_class": "clean"}
    return parse(data)


STOP = {"kind": "stop", "rank": 3, "start_s": 2.0}
EXPECT = {"score_class": "H1", "verdicts": ["stopped"], "ranks": [3], "also": [5], "stage": ["tensor"]}


def culprit(rank: int | None, comm_rank: int | None = None, comm: CommunicatorRef | None = None, stage: str = "") -> Culprit:
    return Culprit(rank, comm_rank, "h", 1, 0, communicator=comm, stage=stage)


@pytest.mark.parametrize(
    ("named", "right"), [([3], True), ([3, 5], True), ([5], False), ([], False), ([3, 4], False), ([2], False)]
)
def test_right_rank_means_all_expected_and_no_other(named: list[int], right: bool) -> None:
    scenario = make([STOP], EXPECT)
    verdict = Verdict(VerdictClass.STOPPED, "s", culprits=tuple(culprit(r) for r in named))
    judged = judge(scenario, Cast(scenario), verdict)
    assert judged.right_class
    assert judged.right_rank is right


def test_stage_and_class() -> None:
    scenario = make([STOP], EXPECT)
    cast = Cast(scenario)
    verdict = Verdict(VerdictClass.HARDWARE, "s", culprits=(culprit(3, stage="Tensor parallel, forward"),))
    judged = judge(scenario, cast, verdict)
    assert not judged.right_class
    assert judged.right_stage is True
    role = Verdict(VerdictClass.STOPPED, "s", communicator=CommunicatorRef("0", 2, "data"))
    assert judge(scenario, cast, role).right_stage is False


def test_ranks_and_links_of_a_communicator_are_the_jobs() -> None:
    expect = {"score_class": "H3", "verdicts": ["hardware"], "also": [2, 6], "link": [2, 6]}
    scenario = make([{"kind": "link-down", "rank": 2, "peer": 6, "start_s": 2.0}], expect)
    cast = Cast(scenario)
    member = cast.membership(2, "pp")
    reference = CommunicatorRef(f"{member.hash:016x}", 2)
    verdict = Verdict(
        VerdictClass.HARDWARE,
        "s",
        culprits=(culprit(None, 1, reference),),
        communicator=reference,
        link=LinkRef(1, 0, "net"),
    )
    judged = judge(scenario, cast, verdict)
    assert judged.named == (6,)
    assert judged.right_link is True
    assert judged.right_rank is True
    nowhere = Verdict(VerdictClass.HARDWARE, "s", culprits=(culprit(6),))
    assert judge(scenario, cast, nowhere).right_link is False


class Says:
    """A diagnoser that says the same at every moment from some time on."""

    name = "says"
    note = "for the test"
    not_yet: frozenset[ScoreClass] = frozenset()

    def __init__(self, verdict: Verdict, from_s: float = 0.0) -> None:
        self.verdict, self.from_s = verdict, from_s
        self.seen: list[RecordSet] = []

    def diagnose(self, records: RecordSet, clock_s: float) -> list[Verdict]:
        self.seen.append(records)
        return [self.verdict] if clock_s >= self.from_s else []


RIGHT = Verdict(VerdictClass.STOPPED, "s", culprits=(culprit(3),))


def test_a_verdict_before_the_fault_is_a_false_alarm() -> None:
    case = Case(make([STOP], EXPECT))
    assert case.effect_s == pytest.approx(3.0)
    early, late = score_case(case, [Says(RIGHT)])[0], score_case(case, [Says(RIGHT, 5.5)])[0]
    assert early.false_alarm
    assert not late.false_alarm
    assert late.right
    assert late.detection_s == late.location_s == 3.0


def test_any_accusation_of_a_clean_job_is_a_false_alarm_and_unknown_is_not() -> None:
    case = Case(make())
    assert score_case(case, [Says(RIGHT)])[0].false_alarm
    quiet = score_case(case, [Says(Verdict(VerdictClass.UNKNOWN, "s"))])[0]
    assert not quiet.false_alarm
    assert quiet.right


def test_precision_recall_and_f1_on_a_hand_made_case() -> None:
    """Two H1 cases and a clean one; the diagnoser always says stopped, rank 3: one right, one wrong place, one false alarm."""
    wrong = EXPECT | {"ranks": [5], "also": []}
    said = Says(RIGHT)
    cases = [Case(make([STOP], EXPECT)), Case(make([STOP | {"rank": 5}], wrong)), Case(make())]
    results = [r for case in cases for r in score_case(case, [said])]
    lines = {line.score_class: line for line in summarise(results, said)}
    h1 = lines["H1"]
    assert (h1.cases, h1.detected, h1.right_class, h1.right, h1.right_rank) == (2, 2, 2, 1, (1, 2))
    assert h1.recall == 0.5
    assert h1.precision == pytest.approx(1 / 3)
    assert h1.f1 == pytest.approx(0.4)
    assert lines["clean"].false_alarms == 1
    assert lines["all faults"].false_alarms == 3
    json.dumps(to_json(results, {"says": list(lines.values())}))


def test_a_diagnoser_can_reach_no_scenario_from_its_records() -> None:
    """Walk every object that hangs off the records: none is of the scenario or of the simulator's inside."""
    says = Says(RIGHT)
    score_case(Case(make([STOP], EXPECT)), [says])
    seen: set[int] = set()
    stack: list[object] = [says.seen[-1]]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type) or callable(item):
            continue
        seen.add(id(item))
        module = type(item).__module__
        allowed = module.startswith(("ncclwatch.model", "builtins", "numpy")) or isinstance(item, RecordSet)
        assert allowed, f"{type(item)} hangs off the records"
        stack += gc.get_referents(item)
    assert len(seen) > 1000


def test_rounds_hold_each_process_once() -> None:
    case = Case(make(observe={"planes": ["state"], "loss": 0.2}))
    records = list(case.moments())[-1].records
    shown = rounds(records)
    for one in shown:
        pids = [s.process.pid for s in one]
        assert len(pids) == len(set(pids))
    # A look that was lost leaves the one before in its place, as in a session.
    assert [len(one) for one in shown] == sorted(len(one) for one in shown)
    assert sorted(id(s) for s in shown[-1]) == sorted(id(series[-1]) for series in records.samples)
    assert sum(len(one) for one in shown) > sum(len(series) for series in records.samples)


def test_baselines_see_what_they_are_made_for_and_leave_a_clean_job_alone() -> None:
    def results(scenario: Scenario) -> dict[str, Any]:
        return {r.diagnoser: r for r in score_case(Case(scenario), all_baselines())}

    clean = results(make(workload={"iterations": 40}))
    assert not any(r.false_alarm for r in clean.values()), {n: r.summary for n, r in clean.items() if r.false_alarm}
    slow = results(
        make(
            [{"kind": "slow-gpu", "rank": 3, "strength": 4.0, "start_s": 4.0}],
            {"score_class": "S1", "verdicts": ["slow-computation"], "ranks": [3]},
            workload={"iterations": 40},
        )
    )
    assert slow["heat map"].right
    assert slow["iteration time"].detected
    assert not slow["call records"].detected
    odd = results(
        make(
            [{"kind": "other-size", "rank": 3, "iteration": 15, "role": "dp", "strength": 4.0}],
            {"score_class": "H2", "verdicts": ["inconsistent"], "ranks": [3], "also": [1]},
            workload={"iterations": 20, "dp_bytes": 16 << 20},
        )
    )
    assert odd["call records"].right_class
    dead = results(make([STOP | {"kind": "kill"}], EXPECT | {"verdicts": ["dead"]}))
    assert dead["launch counts"].right


def test_the_engine_is_fed_as_it_is_live() -> None:
    case = Case(make([STOP], EXPECT))
    result = score_case(case, [Ncclwatch(every=case.every)])[0]
    assert result.detected
    assert not result.false_alarm


def test_the_table_says_simulated_and_what_is_missing() -> None:
    says = Ncclwatch()
    results = score_case(Case(make([STOP], EXPECT)), [says])
    for markdown in (False, True):
        text = render([says], {says.name: summarise(results, says)}, markdown=markdown)
        assert SIMULATED in text
        assert ("no engine yet" in text) == bool(says.not_yet)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "score.json", tmp_path / "score.md"
    arguments = ["--only", "h1-kill", "--json", str(out), "--markdown", str(page), "--without-baselines"]
    assert main(arguments) == 0
    assert "1 scenarios" in capsys.readouterr().out
    data = json.loads(out.read_text())
    assert data["schema"] == "ncclwatch.score/1"
    assert data["source"] == "simulation"
    assert [r["case"] for r in data["results"]] == ["h1-kill"]
    assert "| class | cases |" in page.read_text()
    assert main(["--only", "no such scenario"]) == 1
    (tmp_path / "bad.toml").write_text("x = 1")
    assert main(["--set", "full", "--scenarios", str(tmp_path)]) == 2
