"""The table of rules: what its relations promise, and that what it refers to exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import networkx as nx
import pytest

from ncclwatch.engine import diagnose as diagnosis
from ncclwatch.engine.case import Case, Cause, Hypothesis, naming, nobody, observed
from ncclwatch.engine.rules import RULES, Rule, Stratum, markdown
from ncclwatch.model.verdict import StepKind, VerdictClass
from unit.synthetic import frozen_ring, looks

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


def test_who_names_somebody_defeats_who_names_nobody_and_keeps_its_place_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsure(case: Case) -> Iterator[Hypothesis]:
        yield nobody(Cause.UNSEEN)

    def sure(case: Case) -> Iterator[Hypothesis]:
        suspect = observed(case.job, case.job.member(1), (), (), Cause.NOT_ENTERED)
        yield naming(VerdictClass.NOT_ENTERED, [suspect], range(4), 0.8, ())

    def row(name: str, apply: Callable[[Case], Iterator[Hypothesis]], *defeats: str) -> Rule:
        return Rule(name, Stratum.EXPLAIN, apply, "", "", "", frozenset(defeats))

    def said(*rules: Rule) -> tuple[list[int | None], list[tuple[str, str]]]:
        monkeypatch.setitem(diagnosis._BY_STRATUM, Stratum.EXPLAIN, rules)
        verdict = diagnosis.diagnose(looks(frozen_ring(2, run_state="S")))
        lost = [(step.rule, step.against) for step in verdict.trail if step.kind is StepKind.LOST]
        return [culprit.rank for culprit in verdict.culprits], lost

    assert said(row("a", unsure), row("b", sure), row("c", unsure)) == ([1], [("a", "b"), ("c", "b")])
    assert said(row("b", sure), row("c", unsure, "b")) == ([], [("b", "c")]), "where the table says so"
