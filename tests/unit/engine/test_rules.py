"""The table of rules: what its relations promise, and that what it refers to exists."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest

from ncclwatch.engine.case import Rule, Stratum
from ncclwatch.engine.rules import RULES, markdown

ROOT = Path(__file__).resolve().parents[3]
PLACES = {rule.id: place for place, rule in enumerate(RULES)}


def test_ids_are_unique_and_strata_follow_each_other() -> None:
    assert len(PLACES) == len(RULES)
    assert [rule.stratum for rule in RULES] == sorted(rule.stratum for rule in RULES)


def test_defeats_is_acyclic_and_names_earlier_rules_that_explain() -> None:
    relation = nx.DiGraph((rule.id, other) for rule in RULES for other in rule.defeats)
    assert nx.is_directed_acyclic_graph(relation)
    for rule in RULES:
        assert all(PLACES[other] < PLACES[rule.id] for other in rule.defeats), rule.id


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_what_a_rule_refers_to_exists(rule: Rule) -> None:
    assert rule.derivation and rule.apply.__doc__
    for reference in (rule.recording, rule.near_miss):
        assert exists(reference), f"{rule.id}: {reference}"


def exists(reference: str) -> bool:
    """Whether a recording, a scenario or a test is there; words may say more about the one before."""
    if not reference.startswith("tests/"):
        return reference.startswith(("the same test", "a job "))
    path, _, name = reference.partition("::")
    if path.startswith("tests/fixtures/"):
        return (ROOT / path).with_name(Path(path).name + ".ncclwatch").exists()
    if path.startswith("tests/scenarios/"):
        return (ROOT / f"{path}.toml").exists()
    found = ROOT / path
    return found.exists() and (not name or f"def {name}(" in found.read_text("utf-8"))


def test_the_table_is_written_as_markdown_a_row_a_rule() -> None:
    rows = list(markdown())
    assert len(rows) == len(RULES) + 2
    assert {row.count("|") for row in rows} == {8}
    assert all(stratum.name.lower() in "".join(rows) for stratum in Stratum)
