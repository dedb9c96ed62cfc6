"""The table of rules: what its relations promise, and that what it refers to exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import networkx as nx
import pytest

from ncclwatch.engine import diagnose as diagnosis
from ncclwatch.engine.case import Case, Hypothesis, naming, nobody, observed
from ncclwatch.engine.rules import RULES, Rule, Stratum, markdown
from ncclwatch.model.cause import Cause
from ncclwatch.model.verdict import StepKind, VerdictClass
from unit.synthetic import frozen_ring, looks

ROOT = Path(__file__).resolve().parents[3]
PLACES = {rule.id: place for place, rule in enumerate(RULES)}

HELD_BY = {
    "all-ended": (
        "tests/unit/engine/test_diagnose.py::test_ranks_that_end_when_the_work_is_done_are_not_accused",
        "tests/scenarios/h1-crash-and-watchdog",
    ),
    "one-sample": (
        "tests/unit/engine/test_diagnose.py::test_a_single_look_accuses_nobody",
        "tests/unit/engine/test_diagnose.py::test_who_was_looked_at_once_hides_nobody_else_and_is_not_accused",
    ),
    "progress": (
        "tests/unit/engine/test_diagnose.py::test_progress_of_anyone_means_nobody_is_accused",
        "tests/unit/engine/test_diagnose.py::test_progress_long_ago_does_not_hide_a_standstill",
    ),
    "halted": (
        "tests/unit/engine/test_diagnose.py::test_a_stopped_rank_is_named_and_the_others_are_its_victims",
        "tests/unit/engine/test_diagnose.py::test_ranks_that_end_when_the_work_is_done_are_not_accused",
    ),
    "creation": (
        "tests/scenarios/init-two-missing",
        "tests/unit/engine/test_diagnose.py::test_a_rank_missing_from_creation_that_nobody_looked_at_is_not_accused",
    ),
    "calls-not-made": (
        "tests/unit/engine/test_calls.py::test_a_rank_with_hidden_transports_waits_for_whom_its_call_waits_for",
        "tests/unit/engine/test_calls.py::test_behind_on_one_communicator_because_it_waits_in_another_is_a_victim",
    ),
    "counted-less": (
        "tests/unit/engine/test_one_machine.py::test_who_has_not_called_is_named_by_calls_or_by_counts",
        "tests/unit/engine/test_disagreements.py::test_what_counts_proxy_work_alone_proves_nothing",
    ),
    "messages-owed": (
        "tests/unit/engine/test_calls.py::test_who_has_not_called_the_other_half_of_a_message_is_where_the_waits_end",
        "tests/unit/engine/test_calls.py::test_a_rank_that_may_wait_in_a_receive_is_not_accused_of_being_behind",
    ),
    "pause": (
        "tests/unit/engine/test_diagnose.py::test_patience_before_a_rank_is_accused_on_waits_alone",
        "tests/unit/engine/test_live.py::test_first_operations_get_a_longer_floor_but_no_immunity",
    ),
    "not-begun": (
        "tests/unit/engine/test_retract.py::test_a_rank_that_is_at_two_operations_waits_in_neither",
        "tests/unit/engine/test_retract.py::test_where_nobody_has_begun_anything_there_is_no_cycle_either",
    ),
    "not-completing": (
        "tests/unit/engine/test_connections.py::test_who_does_not_learn_that_what_it_sent_was_received_has_a_proxy_that_stands_still",
        "tests/unit/engine/test_connections.py::test_a_cycle_stays_one_where_both_wait_alike_and_over_sockets",
    ),
    "behind-in-ring": (
        "tests/fixtures/jobs/h3-gpu-stall-tensor-2.32.3-shm-post-hang-0",
        "tests/unit/engine/slow/test_shared_memory.py",
    ),
    "called-less": (
        "tests/unit/engine/test_unobservable_waits.py::test_a_rank_that_has_called_what_its_peer_has_not_waits_for_the_peer",
        "tests/unit/engine/test_unobservable_waits.py::test_a_rank_that_is_behind_its_peer_is_named_although_the_peer_waits_too",
    ),
    "hidden-peer": (
        "tests/unit/engine/test_unobservable_waits.py::test_a_rank_whose_peer_is_held_up_by_a_link_is_not_accused",
        "tests/unit/engine/test_unobservable_waits.py::test_a_rank_whose_peer_does_not_wait_is_named",
    ),
    "message-owed": (
        "tests/unit/engine/test_calls.py::test_the_wait_of_an_idle_rank_for_a_message_is_followed",
        "tests/unit/engine/test_calls.py::test_a_rank_that_may_wait_in_a_receive_is_not_accused_of_being_behind",
    ),
    "message-possible": (
        "tests/unit/engine/test_calls.py::test_an_idle_rank_that_may_wait_for_a_message_is_not_accused",
        "tests/unit/engine/test_calls.py::test_a_rank_that_has_not_called_is_named_where_memory_shows_nothing",
    ),
    "ring-before": (
        "tests/unit/engine/test_retract.py::test_who_has_written_more_of_a_ring_than_read_may_be_in_an_operation_there",
        "tests/unit/engine/test_retract.py::test_who_is_in_the_middle_of_one_ring_is_not_in_the_next",
    ),
    "dropped-operation": (
        "tests/unit/engine/test_dropped_operations.py::test_a_rank_beside_one_that_was_seen_to_end_waits_for_it",
        "tests/unit/engine/test_dropped_operations.py::test_a_gpu_that_has_begun_is_in_the_operation_it_shows",
    ),
    "nothing-open": (
        "tests/unit/engine/test_diagnose.py::test_shared_memory_at_rest_is_idle",
        "tests/scenarios/h1-never-enters-nvlink",
    ),
    "unseen": (
        "tests/scenarios/h1-stop-unseen-node",
        "tests/unit/engine/test_diagnose.py::test_a_missing_rank_of_a_host_that_was_seen_whole_has_ended",
    ),
    "inside-node": (
        "tests/unit/engine/test_unobservable_waits.py::test_a_tree_that_gets_nothing_from_a_node_names_the_gpus_of_that_node",
        "tests/unit/engine/test_unobservable_waits.py::test_gpus_of_a_node_are_not_named_together_where_others_may_be_why",
    ),
    "link": (
        "tests/fixtures/jobs/h3-link-down-gradients-2.27.5-shm-post-hang-0",
        "tests/unit/engine/test_diagnose.py::test_a_link_is_not_blamed_when_the_sender_was_stopped_while_sending",
    ),
    "rank-behind": (
        "tests/fixtures/jobs/drawn-802-112-never-enters-2.27.5-shm-post-hang-0",
        "tests/unit/engine/test_diagnose.py::test_a_rank_with_nothing_open_beside_one_nobody_looked_at_is_not_accused",
    ),
    "cycle": (
        "tests/fixtures/jobs/deadlock-of-four-2.32.3-shm-post-hang-0",
        "tests/fixtures/jobs/h1-skip-tensor-2.27.5-shm-post-hang-0",
    ),
    "counts-differ": (
        "tests/fixtures/jobs/drawn-802-23-other-operation-2.27.5-socket-post-hang-0",
        "tests/unit/engine/test_disagreements.py::test_a_rank_that_is_behind_or_ahead_does_not_disagree",
    ),
    "open-calls-differ": (
        "tests/unit/engine/test_diagnose.py::test_a_rank_that_called_something_else_is_outvoted",
        "tests/unit/engine/test_diagnose.py::test_two_orders_on_two_communicators_are_a_deadlock",
    ),
    "not-called": (
        "tests/unit/engine/test_calls.py::test_who_has_not_called_is_named_although_the_waits_end_unseen",
        "tests/unit/engine/test_calls.py::test_behind_on_one_communicator_because_it_waits_in_another_is_a_victim",
    ),
    "calls-differ": (
        "tests/scenarios/h2-other-type",
        "tests/unit/engine/test_calls.py::test_what_was_recorded_before_a_loss_proves_nothing",
    ),
    "ended-behind": (
        "tests/unit/engine/test_dropped_operations.py::test_a_rank_beside_one_that_was_seen_to_end_waits_for_it",
        "tests/unit/engine/test_dropped_operations.py::test_beside_one_that_was_not_observed_nobody_is_accused",
    ),
    "left-out": (
        "tests/unit/engine/test_one_machine.py::test_who_left_a_call_out_is_named_by_its_habit",
        "tests/unit/engine/test_call_order.py::test_a_habit_with_two_kinds_of_iterations_is_no_deviation",
    ),
    "network-down": (
        "tests/unit/engine/test_explain_network.py::test_a_port_that_went_down_when_the_job_came_to_stand_is_the_cause",
        "tests/unit/engine/test_explain_network.py::test_a_port_that_has_nothing_to_do_with_it_changes_nothing",
    ),
    "tcp-slow": (
        "tests/unit/engine/test_live.py::test_a_link_that_loses_much_is_slow_until_tcp_has_tried_once_more",
        "the same test: once TCP has tried",
    ),
    "network-end": (
        "tests/unit/engine/test_explain_network.py::test_work_requests_tell_a_proxy_from_the_network",
        "tests/unit/engine/test_explain_network.py::test_work_requests_that_were_not_seen_since_tell_nothing",
    ),
    "crawls": (
        "tests/unit/engine/test_beside.py::test_who_is_held_back_alone_is_given_longer_before_that_is_a_hang",
        "the same test: limits of others, of everybody, or that hold back little",
    ),
    "conflict": (
        "tests/unit/engine/test_conflicts.py::test_another_size_type_or_operation_is_named_while_the_job_runs",
        "tests/unit/engine/test_conflicts.py::test_what_proves_nothing_is_not_told",
    ),
    "newcomers": (
        "tests/unit/engine/test_diagnose.py",
        "a job of which all processes were sampled twice",
    ),
    "planes-beside": (
        "tests/unit/engine/test_beside.py::test_who_is_named_for_standing_still_and_is_held_back_is_shown_so",
        "tests/unit/engine/test_beside.py::test_limits_of_others_or_that_hold_nobody_back_are_not_told",
    ),
}
"""Rule → (recording, scenario or test that is judged wrongly without it, one that looks alike and that it must leave alone)"""


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
    for reference in HELD_BY[rule.id]:
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
    assert {row.count("|") for row in rows} == {6}
    assert all(stratum.name.lower() in "".join(rows) for stratum in Stratum)


def test_who_names_somebody_defeats_who_names_nobody_and_keeps_its_place_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsure(case: Case) -> Iterator[Hypothesis]:
        yield nobody(Cause.UNSEEN)

    def sure(case: Case) -> Iterator[Hypothesis]:
        suspect = observed(case.job, case.job.member(1), (), (), Cause.NOT_ENTERED)
        yield naming(VerdictClass.NOT_ENTERED, [suspect], range(4), 0.8, ())

    def row(name: str, apply: Callable[[Case], Iterator[Hypothesis]], *defeats: str) -> Rule:
        return Rule(name, Stratum.EXPLAIN, apply, "", frozenset(defeats))

    def said(*rules: Rule) -> tuple[list[int | None], list[tuple[str, str]]]:
        monkeypatch.setitem(diagnosis._BY_STRATUM, Stratum.EXPLAIN, rules)
        verdict = diagnosis.diagnose(looks(frozen_ring(2, run_state="S")))
        lost = [(step.rule, step.against) for step in verdict.trail if step.kind is StepKind.LOST]
        return [culprit.rank for culprit in verdict.culprits], lost

    assert said(row("a", unsure), row("b", sure), row("c", unsure)) == ([1], [("a", "b"), ("c", "b")])
    assert said(row("b", sure), row("c", unsure, "b")) == ([], [("b", "c")]), "where the table says so"
