"""What ``paths follow`` does with rates: a plan on which flows are slower is taken back, and the file is what it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ncclwatch.cli import main
from ncclwatch.cli.paths_keeper import Keeper
from ncclwatch.paths.measured import MeasuredFlow
from ncclwatch.paths.pins import HEADING
from unit.cli.test_paths_plan import written
from unit.paths.test_measured import FLOWS, LIVE, OWN, A, probe

OLD = f"{HEADING}\nlisten 1 10.0.1.1 40000 40001\nconnect 0 10.0.1.1 40000 500\n"


def on_plan(text: str, rate: float) -> list[MeasuredFlow]:
    pins = [line.split() for line in text.splitlines() if line.startswith("connect")]
    return [replace(FLOWS[0], source_port=int(pin[4]), port=int(pin[3]), rate=rate) for pin in pins]


def looked(keeper: Keeper, plan: Path, before: float, after: float) -> list[object]:
    found = [keeper.judge([replace(one, rate=before) for one in FLOWS]) for _ in range(5)]
    found += [keeper.judge(on_plan(plan.read_text(), after)) for _ in range(5)]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("old", [OLD, None, "something else"])
def test_a_plan_on_which_flows_are_slower_is_taken_back(tmp_path: Path, old: str | None) -> None:
    plan = tmp_path / "plan"
    if old is not None:
        plan.write_text(old)
    keeper = Keeper(FLOWS, [probe(*OWN, *LIVE)], {A}, plan)
    keeper.publish()
    planned = plan.read_text()
    assert planned != old and planned.count("connect") == 2
    assert len(looked(keeper, plan, 100e6, 40e6)) == 1
    assert plan.read_text() == (OLD if old == OLD else f"{HEADING}\n"), "what is no plan of ours is not put back"
    keeper.publish()
    assert plan.read_text() == planned, "a path that changes makes a plan again"


def test_a_plan_on_which_flows_are_as_fast_stays(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text(OLD)
    keeper = Keeper(FLOWS, [probe(*OWN, *LIVE)], {A}, plan)
    keeper.publish()
    planned = plan.read_text()
    assert not looked(keeper, plan, 100e6, 100e6) and plan.read_text() == planned


def test_pids_and_all_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["paths", "follow", *written(tmp_path, probe(*OWN)), "-o", str(tmp_path / "x")]
    assert main.run([*words, "--all", "--pid", "1"]) == 2 and "exclude each other" in capsys.readouterr().err
