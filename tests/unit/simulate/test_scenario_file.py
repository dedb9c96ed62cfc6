"""Scenario files: what is refused and how, and that the whole catalogue is sound, complete, and maps to the testbed's options."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.errors import UsageError
from ncclwatch.simulate.scenario import FaultKind, LookalikeKind, Scenario, ScoreClass, load, load_all, parse
from ncclwatch.simulate.testbed import HarnessAction, as_testbed_runs, fitted, plan

CATALOGUE = Path(__file__).resolve().parent.parent.parent / "scenarios"
CLEAN: dict[str, Any] = {"name": "x", "title": "t", "seed": 1, "expect": {"score_class": "clean"}}
FAULT: dict[str, Any] = {"kind": "stop", "rank": 1, "start_s": 1.0}
HANG: dict[str, Any] = {"score_class": "H1", "verdicts": ["stopped"], "ranks": [1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "unknown field 'colour'"),
        ({"layout": {"tp": 0}}, "layout.tp must be at least 1"),
        ({"layout": {"tp": "two"}}, "layout: tp: expected int"),
        ({"layout": {"dp": 4, "ep": 3}}, "ep must divide"),
        ({"workload": {"schedule": "2f2b"}}, "'2f2b' is not known"),
        ({"workload": {"virtual_stages": 2}}, "needs schedule interleaved-1f1b"),
        (
            {"workload": {"schedule": "interleaved-1f1b", "virtual_stages": 2, "micro_batches": 3}, "layout": {"pp": 2}},
            "multiple of pp",
        ),
        ({"network": {"nccl": "2.x"}}, "network.nccl must be like 2.27.5"),
        ({"network": {"intra_node": "carrier-pigeon"}}, "is not known"),
        ({"observe": {"planes": ["astral"]}}, "'astral' is not known"),
        ({"observe": {"loss": 1.0}}, "observe.loss must be in"),
        ({"faults": [FAULT], "layout": {"dp": 2}}, "only a clean one has none"),
        ({"faults": [FAULT], "layout": {"dp": 2}, "expect": HANG | {"verdicts": []}}, "needs expect.verdicts"),
        ({"faults": [FAULT], "layout": {"dp": 2}, "expect": HANG | {"verdicts": ["running"]}}, "must accuse"),
        ({"faults": [FAULT | {"rank": 7}], "layout": {"dp": 2}, "expect": HANG}, "rank 7 is not in a job of 2"),
        ({"faults": [FAULT | {"iteration": 1}], "layout": {"dp": 2}, "expect": HANG}, "not both or none"),
        ({"faults": [FAULT | {"kind": "skip"}], "layout": {"dp": 2}, "expect": HANG}, "needs iteration"),
        ({"faults": [FAULT | {"kind": "link-down"}], "layout": {"dp": 2}, "expect": HANG}, "another rank as peer"),
        ({"faults": [FAULT | {"duration_s": 0}], "layout": {"dp": 2}, "expect": HANG}, "duration_s must be positive"),
        ({"lookalikes": [{"kind": "checkpoint", "iteration": 99}]}, "iteration out of range"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(CLEAN | change, "some.toml")


def test_a_missing_field_and_a_file_that_is_no_toml(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="field 'seed' is missing"):
        parse({"name": "x", "title": "t", "expect": {"score_class": "clean"}})
    bad = tmp_path / "bad.toml"
    bad.write_text("seed = = 1")
    with pytest.raises(UsageError, match=r"bad\.toml is not TOML"):
        load(bad)
    with pytest.raises(UsageError, match="cannot read scenario"):
        load(tmp_path / "none.toml")


def test_values_arrive(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(
        'title = "t"\nseed = 5\n[layout]\ndp = 2\n[expect]\nscore_class = "H1"\nverdicts = ["dead"]\n'
        '[[faults]]\nkind = "kill"\nrank = 1\nstart_s = 2\n'
    )
    scenario = load(path)
    assert scenario.name == "one"
    assert scenario.faults[0].start_s == 2.0
    assert math.isinf(scenario.faults[0].duration_s)
    assert scenario.expect.score_class is ScoreClass.H1


@pytest.fixture(scope="module")
def catalogue() -> list[Scenario]:
    return load_all(CATALOGUE)


def test_the_catalogue_has_every_fault_look_alike_and_class(catalogue: list[Scenario]) -> None:
    assert {f.kind for s in catalogue for f in s.faults} == set(FaultKind)
    assert {e.kind for s in catalogue for e in s.lookalikes} == set(LookalikeKind)
    for score_class in ScoreClass:
        assert sum(s.expect.score_class is score_class for s in catalogue) >= 2, score_class


def test_every_scenario_has_its_own_seed_and_a_set(catalogue: list[Scenario]) -> None:
    assert len({s.seed for s in catalogue}) == len(catalogue)
    assert all(set(s.tags) & {"ci", "scale", "quick", "quick-slow"} for s in catalogue)
    assert {s.network.nccl for s in catalogue} >= {"2.21.5", "2.27.5", "2.32.3"}


def test_what_is_marked_for_the_testbed_maps_to_it(catalogue: list[Scenario]) -> None:
    marked = [s for s in catalogue if "testbed" in s.tags]
    assert len(marked) > 30
    for scenario in marked:
        made = plan(scenario)
        assert made.ranks == sum(made.hosts) == scenario.layout.world
        assert "NVLink" not in " ".join(made.unsupported)
        played = len(made.actions) + sum(o == "--fault" for o in made.options)
        assert played or made.unsupported or not scenario.faults


def test_the_command_line_of_a_scenario() -> None:
    faults = [
        {"kind": "skip", "rank": 3, "iteration": 5, "role": "dp"},
        {"kind": "stop", "rank": 2, "iteration": 6, "duration_s": 4.0},
    ]
    data = CLEAN | {"layout": {"tp": 2, "pp": 2, "dp": 2}, "faults": faults, "expect": HANG}
    made = plan(parse(data))
    text = " ".join(made.options)
    assert "--tp 2 --cp 1 --pp 2 --ep 1 --schedule 1f1b --micro-batches 4" in text
    assert "--forward-us 10000" in text
    assert "--fault skip:rank=3,at=5,group=dp,nth=0" in text
    assert "--fault stop:rank=2,at=6" in text
    assert made.actions == (HarnessAction("thaw", (2,), 4.0),)
    assert as_testbed_runs(parse(data)).workload.backward_ms == 40.0


def test_where_in_an_operation_a_fault_strikes() -> None:
    faults = [
        {"kind": "gpu-stall", "rank": 3, "iteration": 5, "role": "dp", "occurrence": 1, "offset_ms": 8.0},
        {"kind": "kill", "rank": 1, "start_s": 2.5},
        {"kind": "few-cpus", "rank": 5, "start_s": 1.0},
    ]
    layout = {"tp": 2, "pp": 2, "dp": 2, "ranks_per_node": 4}
    sockets = {"intra_node": "net", "net": "socket"}
    work = {"tp_bytes": 1 << 24, "pp_bytes": 1 << 20}
    data = CLEAN | {"layout": layout, "workload": work, "network": sockets, "faults": faults, "expect": HANG}
    scenario = parse(data)
    assert any("one size" in reason for reason in plan(scenario).unsupported)
    made = plan(fitted(scenario))
    assert made.unsupported == ()
    assert "--fault stall_gpu:rank=3,at=5,group=dp,nth=1,delay_us=8000" in " ".join(made.options)
    assert made.actions == (HarnessAction("kill", (1,), 2.5), HarnessAction("limit", (4, 5, 6, 7), 1.0, 0.08, iterations=3))
    assert (made.hosts, made.shared_memory) == ((4, 4), False), "a fault of a host needs one that NCCL knows"
    alone = plan(fitted(parse(data | {"faults": faults[:2]})))
    assert (alone.hosts, alone.shared_memory) == ((1,) * 8, True)
    shared = plan(fitted(parse(data | {"network": {"intra_node": "shm", "net": "socket"}})))
    assert (shared.hosts, shared.shared_memory) == ((4, 4), True)
