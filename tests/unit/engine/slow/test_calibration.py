"""The table of what was learned from recordings: whole, with sample sizes, and refused when it is broken."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

import pytest

from ncclwatch.engine.slow import calibration
from ncclwatch.engine.slow.calibration import TABLE, load
from ncclwatch.engine.slow.terms import TERMS, CandidateKind

PARTS = ("since", "start")


def table() -> Any:
    return json.loads(resources.files("ncclwatch.engine.slow").joinpath(calibration.FILE).read_text("utf-8"))


@pytest.mark.parametrize("part", PARTS)
def test_every_term_has_a_weight_and_a_sample_size(part: str) -> None:
    weights = getattr(TABLE, part)
    assert set(weights.terms) == {*TERMS, "idle"}
    assert all(math.isfinite(value) and value >= 0 for value in weights.terms.values()), "none speaks against what it shows"
    assert all(map(math.isfinite, (*weights.kinds.values(), weights.nobody))) and weights.kinds["rank"] == 0
    assert weights.jobs > 0 and TABLE.note[part]["jobs"] == weights.jobs
    note = TABLE.note[part]
    assert note["right"] + note["silent"] <= note["faulty"] <= note["jobs"] and note["real"] <= note["jobs"]
    assert note["wrong"] <= note["jobs"]


@pytest.mark.parametrize("part", PARTS)
def test_every_kind_of_candidate_has_an_intercept(part: str) -> None:
    assert set(getattr(TABLE, part).kinds) == {kind.value for kind in CandidateKind}


def test_thresholds_are_probabilities_and_odds() -> None:
    assert set(TABLE.name_from) == {*PARTS, "beside"}
    assert all(0.5 < value < 1 for value in TABLE.name_from.values()), TABLE.name_from
    assert 0 < TABLE.change_log_bayes_factor < 50


def test_a_table_given_as_text_is_read_as_the_one_of_this_release() -> None:
    assert load(json.dumps(table())) == load() == TABLE


@pytest.mark.parametrize("key", [*PARTS, "name_from", "change_log_bayes_factor", "note"])
def test_a_table_that_lacks_something_is_refused(key: str) -> None:
    broken = table()
    del broken[key]
    with pytest.raises((ValueError, KeyError)):
        load(json.dumps(broken))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7"])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        load(text)


@pytest.mark.parametrize("change", [{"nobody": None}, {"unknown": 1}])
def test_weights_that_are_none_are_refused(change: dict[str, Any]) -> None:
    broken = table()
    broken["since"] |= change
    for key in [key for key, value in change.items() if value is None]:
        del broken["since"][key]
    with pytest.raises((ValueError, KeyError)):
        load(json.dumps(broken))
