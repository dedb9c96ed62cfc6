"""The reliability table: bins, their merging, and whether what is stated is what was found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from score.reliability import FEWEST, Said, bins, by_rule, main, table


def said(confidence: float, right: int, wrong: int, *rules: str) -> list[Said]:
    return [Said(confidence, True, rules)] * right + [Said(confidence, False, rules)] * wrong


def test_a_bin_is_honest_where_what_is_stated_lies_within_the_interval() -> None:
    good, bad = bins(said(0.85, 51, 9) + said(0.97, 48, 12))
    assert (good.low, good.high, good.right.count, good.honest) == (0.8, 0.9, 51, True)
    assert bad.stated == pytest.approx(0.97) and not bad.honest, "four of five were right"


def test_too_modest_is_no_more_honest_than_too_proud() -> None:
    [one] = bins(said(0.75, 200, 0))
    assert not one.honest


def test_small_bins_join_the_smaller_neighbour() -> None:
    made = bins(said(0.55, 10, 0) + said(0.65, 100, 0) + said(0.85, 30, 0) + said(0.92, 40, 0) + said(0.97, 500, 0))
    assert [(one.low, one.high, len(one.said)) for one in made] == [(0.5, 0.7, 110), (0.8, 0.95, 70), (0.95, 1.0, 500)]
    assert all(len(one.said) >= FEWEST for one in made)
    [alone] = bins(said(1.0, 3, 0))
    assert len(alone.said) == 3, "there is nothing to join it with"


def test_every_verdict_is_in_one_bin() -> None:
    everything = [Said(n / 100, True) for n in range(101)]
    assert sum(len(one.said) for one in bins(everything, fewest=1)) == 101


def test_the_command_reads_what_score_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def entry(
        confidence: float | None, *, right: bool, verdict: str = "stopped", diagnoser: str = "ncclwatch"
    ) -> dict[str, object]:
        return {"diagnoser": diagnoser, "said": verdict, "right": right, "confidence": confidence, "rules": ["stopped"]}

    results = [entry(0.95, right=True)] * 95 + [entry(0.95, right=False)] * 5
    results += [entry(None, right=False, verdict=""), entry(0.95, right=False, diagnoser="heat map")]
    file = tmp_path / "score.json"
    file.write_text(json.dumps({"results": results}))
    assert main([str(file), "--by-rule"]) == 0
    text = capsys.readouterr().out
    assert "| 95% to 100% | 100 | 95.0% | 95 | 95.0% | 88.7% to 98.4% | yes |" in text
    assert "| stopped | 100 | 95.0% | 95.0% |" in text
    file.write_text(json.dumps({"results": results[:1] * 30 + results[-2:] + [entry(0.95, right=False)] * 30}))
    assert main([str(file)]) == 1
    file.write_text(json.dumps({"results": results[-2:]}))
    assert main([str(file)]) == 2


def test_tables_say_where_there_are_too_few() -> None:
    assert f"fewer than {FEWEST}" in table(said(0.9, 3, 0))
    assert "(none named)" in by_rule(said(0.9, 3, 0))
