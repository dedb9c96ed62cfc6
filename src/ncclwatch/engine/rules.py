"""The rules of the hang diagnosis: one ordered table. ``python -m ncclwatch.engine.rules`` prints it as Markdown.

Rules of one stratum run in the order of the table. RETRACT and FOLLOW take turns until neither changes the graph. Hypotheses are
weighed in the order of the table: one stands until a rule that defeats its rule concludes another, or any names somebody where it
names nobody. Nothing else decides which of two explanations is told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ncclwatch.engine import beside, explain_calls, explain_network, explain_waits, redraw, stated
from ncclwatch.engine.case import Case, Conclusion


class Stratum(IntEnum):
    """When a rule runs."""

    STATED = 1
    """What the operating system or NCCL states outright: it needs no patience, and ends the inference."""
    DRAW = 2
    """Waits that follow from calls and counts, of every rank."""
    PATIENCE = 3
    """Whether nothing has moved for long enough to accuse anybody of waiting; if not, that ends the inference."""
    RETRACT = 4
    """Waits that count no longer: those that are not begun."""
    FOLLOW = 5
    """Weaker waits, of ranks at which the waits end: whom such a rank may wait for itself, unseen."""
    EXPLAIN = 6
    """Hypotheses from where the waits end, and from what was called."""
    QUALIFY = 7
    """What other evidence says of the hypothesis that stands: a pattern of calls, a port that is down, a CPU limit."""
    BESIDE = 8
    """What is told beside whatever stands, those of the first strata included."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``defeats`` names earlier rules only, so that the relation is acyclic (tested).

    ``derivation``: why it is true (NCCL source with tag, paper section). ``recording``: the archived job, scenario or test it is
    needed for. ``near_miss``: one that looks alike and that it must leave alone.
    """

    id: str
    stratum: Stratum
    apply: Callable[[Case], Iterable[Conclusion]]
    derivation: str
    recording: str
    near_miss: str
    defeats: frozenset[str] = field(default_factory=frozenset)
    breaks_ties: bool = False
    """Whether it defeats, too, what names all sides of a disagreement for want of anything better."""


FROM_ENDS = frozenset({"link", "rank-behind"})
FROM_MEMORY = FROM_ENDS | {"nothing-open", "cycle", "counts-differ", "open-calls-differ"}
FROM_CALLS = frozenset({"not-called", "calls-differ", "left-out"})
OPEN_TO_DOUBT = FROM_ENDS | FROM_CALLS | {"cycle"}
"""Where the waits or the calls that can be seen end: a port or a path below that may be why."""
NETWORK = frozenset({"network-down", "network-end"})

RULES = (
    Rule(
        "all-ended", Stratum.STATED, stated.all_ended,
        "The run state of each process is Z or X (/proc/PID/stat).",
        "tests/scenarios/h1-crash-and-watchdog",
        "tests/unit/engine/test_diagnose.py::test_ranks_that_end_when_the_work_is_done_are_not_accused",
    ),
    Rule(
        "one-sample", Stratum.STATED, stated.one_sample,
        "Progress is told by comparing two samples of a process.",
        "tests/unit/engine/test_diagnose.py::test_a_single_look_accuses_nobody",
        "tests/unit/engine/test_diagnose.py::test_who_was_looked_at_once_hides_nobody_else_and_is_not_accused",
    ),
    Rule(
        "progress", Stratum.STATED, stated.progress,
        "A counter of NCCL moved between the last two samples: the job goes on.",
        "tests/unit/engine/test_diagnose.py::test_progress_of_anyone_means_nobody_is_accused",
        "tests/unit/engine/test_diagnose.py::test_progress_long_ago_does_not_hide_a_standstill",
    ),
    Rule(
        "halted", Stratum.STATED, stated.halted,
        "State T or t in /proc/PID/stat of two samples: no thread of it runs. Or it is gone from its host, and a collective of "
        "its communicator stands still: none can end without every rank.",
        "tests/scenarios/h1-kill",
        "tests/unit/engine/test_diagnose.py::test_ranks_that_end_when_the_work_is_done_are_not_accused",
    ),
    Rule(
        "creation", Stratum.STATED, stated.creation,
        "initState of a communicator that is not ncclSuccess yet; NCCL sets hash, rank and size before the ranks meet "
        "(ncclCommInitRankFunc, src/init.cc): who is missing can be read while creation hangs.",
        "tests/scenarios/init-two-missing",
        "tests/unit/engine/test_diagnose.py::test_a_rank_missing_from_creation_that_nobody_looked_at_is_not_accused",
    ),
    Rule(
        "calls-not-made", Stratum.DRAW, redraw.calls_not_made,
        "A collective ends on no rank before all have called it; memory shows no transfer of the waiter that would say "
        "otherwise.",
        "tests/unit/engine/test_calls.py::test_a_rank_with_hidden_transports_waits_for_whom_its_call_waits_for",
        "tests/unit/engine/test_calls.py::test_behind_on_one_communicator_because_it_waits_in_another_is_a_victim",
    ),
    Rule(
        "counted-less", Stratum.DRAW, redraw.counted_less,
        "seqNumber counts calls of each collective on each rank from 2.26 on (ncclComm.seqNumber).",
        "tests/unit/engine/test_one_machine.py::test_who_has_not_called_is_named_by_calls_or_by_counts",
        "tests/unit/engine/test_disagreements.py::test_what_counts_proxy_work_alone_proves_nothing",
    ),
    Rule(
        "messages-owed", Stratum.DRAW, redraw.messages_owed_by_all,
        "A Send ends once its Recv is called: calls of both ranks since their newest common collective are compared.",
        "tests/unit/engine/test_calls.py::test_who_has_not_called_the_other_half_of_a_message_is_where_the_waits_end",
        "tests/unit/engine/test_calls.py::test_a_rank_that_may_wait_in_a_receive_is_not_accused_of_being_behind",
    ),
    Rule(
        "pause", Stratum.PATIENCE, stated.pause,
        "A checkpoint, an evaluation or a first iteration stands still as well: twice the longest standstill of this "
        "operation that ended.",
        "tests/scenarios/lookalike-checkpoint",
        "tests/unit/engine/test_live.py::test_first_operations_get_a_longer_floor_but_no_immunity",
    ),
    Rule(
        "not-begun", Stratum.RETRACT, redraw.not_begun,
        "A GPU is in one operation of a stream, but proxies open the receives of all that is called. A ring begins with a "
        "send (src/device/all_reduce.h): no send produced, not begun. Ranks run one program: a receive that a peer has open "
        "as well did not keep that peer from the collective.",
        "tests/unit/engine/test_retract.py::test_a_rank_that_is_at_two_operations_waits_in_neither",
        "tests/unit/engine/test_retract.py::test_where_nobody_has_begun_anything_there_is_no_cycle_either",
    ),
    Rule(
        "not-completing", Stratum.RETRACT, redraw.not_completing,
        "The adapter acknowledges what it takes (reliable connection; ncclIbTest, src/transport/net_ib.cc): only the "
        "sender's proxy is left to move.",
        "tests/unit/engine/test_connections.py::test_who_does_not_learn_that_what_it_sent_was_received_has_a_proxy_that_s"
        "tands_still",
        "tests/unit/engine/test_connections.py::test_a_cycle_stays_one_where_both_wait_alike_and_over_sockets",
    ),
    Rule(
        "behind-in-ring", Stratum.RETRACT, redraw.behind_in_ring,
        "All ranks of a ring write the same number of steps an operation, and nobody ends it before the last has "
        "contributed.",
        "tests/fixtures/jobs/h3-gpu-stall-tensor-2.32.3-shm-post-hang-0",
        "tests/unit/engine/slow/test_shared_memory.py",
    ),
    Rule(
        "called-less", Stratum.FOLLOW, redraw.called_less,
        "opCount and seqNumber count what was launched: who has called more waits for who has called less.",
        "tests/scenarios/h1-never-enters-nvlink",
        "tests/unit/engine/test_unobservable_waits.py::test_a_rank_that_is_behind_its_peer_is_named_although_the_peer_wai"
        "ts_too",
    ),
    Rule(
        "hidden-peer", Stratum.FOLLOW, redraw.hidden_peer,
        "Counters of NVLink lie in GPU memory: a rank that shows nothing may wait for a peer that waits itself.",
        "tests/unit/engine/test_unobservable_waits.py::test_a_rank_whose_peer_is_held_up_by_a_link_is_not_accused",
        "tests/unit/engine/test_unobservable_waits.py::test_a_rank_whose_peer_does_not_wait_is_named",
    ),
    Rule(
        "message-owed", Stratum.FOLLOW, redraw.message_owed,
        "As messages-owed, for a rank with nothing open.",
        "tests/unit/engine/test_calls.py::test_the_wait_of_an_idle_rank_for_a_message_is_followed",
        "tests/unit/engine/test_calls.py::test_a_rank_that_may_wait_in_a_receive_is_not_accused_of_being_behind",
    ),
    Rule(
        "message-possible", Stratum.FOLLOW, redraw.message_possible,
        "A rank whose calls do not tell, or that nobody recorded, may wait in a receive: it is not accused of standing "
        "idle.",
        "tests/unit/engine/test_calls.py::test_an_idle_rank_that_may_wait_for_a_message_is_not_accused",
        "tests/unit/engine/test_calls.py::test_a_rank_that_has_not_called_is_named_where_memory_shows_nothing",
    ),
    Rule(
        "ring-before", Stratum.FOLLOW, redraw.ring_before,
        "AllReduce, AllGather and ReduceScatter write and read as much on each ring: who has read less is in one of them.",
        "tests/unit/engine/test_retract.py::test_who_has_written_more_of_a_ring_than_read_may_be_in_an_operati"
        "on_there",
        "tests/unit/engine/test_retract.py::test_who_is_in_the_middle_of_one_ring_is_not_in_the_next",
    ),
    Rule(
        "dropped-operation", Stratum.FOLLOW, redraw.dropped_operation,
        "A proxy drops an operation whose transport reports an error, from 2.22 on without a word (progressOps, "
        "src/proxy.cc).",
        "tests/unit/engine/test_dropped_operations.py::test_a_rank_beside_one_that_was_seen_to_end_waits_for_it",
        "tests/unit/engine/test_dropped_operations.py::test_a_gpu_that_has_begun_is_in_the_operation_it_shows",
    ),
    Rule(
        "nothing-open", Stratum.EXPLAIN, stated.nothing_open,
        "No proxy has an operation, no shared memory holds unread data. asyncResult of a communicator is an error: NCCL has "
        "given it up. What NVLink joins has no counters that the host can read.",
        "tests/unit/engine/test_diagnose.py::test_shared_memory_at_rest_is_idle",
        "tests/scenarios/h1-never-enters-nvlink",
    ),
    Rule(
        "unseen", Stratum.EXPLAIN, explain_waits.unseen,
        "Absence of records proves nothing: waits that end where nobody looked, or at a rank that may wait for one nobody "
        "observed, accuse nobody.",
        "tests/scenarios/h1-stop-unseen-node",
        "tests/unit/engine/test_diagnose.py::test_a_missing_rank_of_a_host_that_was_seen_whole_has_ended",
    ),
    Rule(
        "link", Stratum.EXPLAIN, explain_waits.link,
        "Steps at both ends (src/transport/net.cc): handed to the network by one, not arrived at the other, and both "
        "proxies run. Several links do not die at once.",
        "tests/fixtures/jobs/h3-link-down-gradients-2.27.5-shm-post-hang-0",
        "tests/unit/engine/test_diagnose.py::test_a_link_is_not_blamed_when_the_sender_was_stopped_while_sending",
    ),
    Rule(
        "rank-behind", Stratum.EXPLAIN, explain_waits.rank_behind,
        "CCL-D H1: others wait in an operation that this rank's host has not called, or its GPU has not started. Mycroft, table "
        "4: it is in it, all it needs is there, and its GPU or its proxy does not go on.",
        "tests/fixtures/jobs/drawn-802-112-never-enters-2.27.5-shm-post-hang-0",
        "tests/unit/engine/test_diagnose.py::test_a_rank_with_nothing_open_beside_one_nobody_looked_at_is_not_accused",
        frozenset({"link"}),
    ),
    Rule(
        "cycle", Stratum.EXPLAIN, explain_waits.cycle,
        "A cycle of waits through several communicators has no other end than the order in which they were called. Hosts that "
        "run ahead have called everything: where one alone has a call to make, the others are ahead of it. As many calls, "
        "another operation: CCL-D H2.",
        "tests/fixtures/jobs/deadlock-of-four-2.32.3-shm-post-hang-0",
        "tests/fixtures/jobs/h1-skip-tensor-2.27.5-shm-post-hang-0",
        FROM_ENDS | {"unseen"},
    ),
    Rule(
        "counts-differ", Stratum.EXPLAIN, explain_calls.counts_differ,
        "Of ranks that call the same in one order none is ahead in one collective and behind in another (seqNumber, 2.26 "
        "on). CCL-D H2: a tie is a tie.",
        "tests/fixtures/jobs/drawn-802-23-other-operation-2.27.5-socket-post-hang-0",
        "tests/unit/engine/test_disagreements.py::test_a_rank_that_is_behind_or_ahead_does_not_disagree",
        FROM_ENDS | {"cycle"},
    ),
    Rule(
        "open-calls-differ", Stratum.EXPLAIN, explain_calls.open_calls_differ,
        "Both ends of a connection round the same running step (src/transport/net.cc): other begins or ends are other "
        "operations.",
        "tests/unit/engine/test_diagnose.py::test_a_rank_that_called_something_else_is_outvoted",
        "tests/unit/engine/test_diagnose.py::test_two_orders_on_two_communicators_are_a_deadlock",
        FROM_ENDS | {"cycle", "counts-differ"},
    ),
    Rule(
        "not-called", Stratum.EXPLAIN, explain_calls.not_called,
        "CCL-D H1 by calls: the others have called it, and this rank waits for nobody.",
        "tests/unit/engine/test_calls.py::test_who_has_not_called_is_named_although_the_waits_end_unseen",
        "tests/unit/engine/test_calls.py::test_behind_on_one_communicator_because_it_waits_in_another_is_a_victim",
        frozenset({"nothing-open"}),
    ),
    Rule(
        "calls-differ", Stratum.EXPLAIN, explain_calls.calls_differ,
        "CCL-D H2 by calls: NCCL does not compare what ranks call under one number.",
        "tests/scenarios/h2-other-type",
        "tests/unit/engine/test_calls.py::test_what_was_recorded_before_a_loss_proves_nothing",
        FROM_MEMORY,
    ),
    Rule(
        "ended-behind", Stratum.EXPLAIN, stated.ended_behind,
        "As ended, where a followed wait leads to the rank.",
        "tests/unit/engine/test_dropped_operations.py::test_one_that_is_missing_on_a_host_that_was_seen_whole_has_ended",
        "tests/unit/engine/test_dropped_operations.py::test_beside_one_that_was_not_observed_nobody_is_accused",
        FROM_MEMORY | {"not-called", "calls-differ"},
    ),
    Rule(
        "left-out", Stratum.QUALIFY, explain_calls.left_out,
        "A job calls the same in the same order again and again: who has left a call out is one behind in all that "
        "follows.",
        "tests/scenarios/h1-skip-tensor",
        "tests/unit/engine/test_call_order.py::test_a_habit_with_two_kinds_of_iterations_is_no_deviation",
        frozenset({"cycle", "rank-behind", "not-called"}),
        breaks_ties=True,
    ),
    Rule(
        "network-down", Stratum.QUALIFY, explain_network.network_down,
        "A link cut while nothing is under way leaves no trace in memory, and proxies drop what their transport reports as "
        "failed (progressOps, src/proxy.cc). Whoever has only stopped reading still acknowledges (RFC 9293, 3.8.6): segments "
        "that are sent five times without an answer are the network's doing.",
        "tests/unit/engine/test_explain_network.py::test_a_port_that_went_down_when_the_job_came_to_stand_is_the_cause",
        "tests/unit/engine/test_explain_network.py::test_a_port_that_has_nothing_to_do_with_it_changes_nothing",
        OPEN_TO_DOUBT,
    ),
    Rule(
        "tcp-slow", Stratum.QUALIFY, explain_network.tcp_slow,
        "TCP waits twice as long after each loss (Linux, TCP_RTO_MIN 0.2 s): a link that loses much stands still for many "
        "seconds, and comes through.",
        "tests/unit/engine/test_live.py::test_a_link_that_loses_much_is_slow_until_tcp_has_tried_once_more",
        "the same test: once TCP has tried",
        frozenset({"link"}),
    ),
    Rule(
        "network-end", Stratum.QUALIFY, explain_network.network_end,
        "Both ends of a dead link are named for want of anything better: the port of one being down decides between them. TCP "
        "tells proxy and network apart; so do completions: an adapter completes what the other acknowledges, and a proxy with "
        "requests under way polls for it without pause (ncclIbTest, src/transport/net_ib.cc).",
        "tests/unit/engine/test_explain_network.py::test_work_requests_tell_a_proxy_from_the_network",
        "tests/unit/engine/test_explain_network.py::test_work_requests_that_were_not_seen_since_tell_nothing",
        frozenset({"link"}),
    ),
    Rule(
        "crawls", Stratum.QUALIFY, explain_network.crawls,
        "A process runs in each period of its CPU limit (cpu.max, 100 ms): it crawls, and does not hang.",
        "tests/unit/engine/test_beside.py::test_who_is_held_back_alone_is_given_longer_before_that_is_a_hang",
        "the same test: limits of others, of everybody, or that hold back little",
        NETWORK | FROM_CALLS | FROM_ENDS | {"cycle"},
    ),
    Rule(
        "conflict", Stratum.BESIDE, explain_calls.conflict,
        "NCCL compares nothing: as long as as many messages go as are waited for, the job goes on with what it got. Ranks lined "
        "up by counts that need no guess agree again afterwards, and nowhere better when one is moved on or back.",
        "tests/unit/engine/test_conflicts.py::test_another_size_type_or_operation_is_named_while_the_job_runs",
        "tests/unit/engine/test_conflicts.py::test_what_proves_nothing_is_not_told",
    ),
    Rule(
        "newcomers", Stratum.BESIDE, beside.newcomers,
        "Progress is told by comparing two samples of a process.",
        "tests/unit/engine/test_diagnose.py",
        "a job of which all processes were sampled twice",
        FROM_MEMORY | FROM_CALLS | NETWORK | {"tcp-slow", "halted", "creation", "ended-behind"},
    ),
    Rule(
        "planes-beside", Stratum.BESIDE, beside.planes_beside,
        "The shim in the process reports which kernels have begun and ended (ncclProfiler, src/plugin/profiler.cc). Requests "
        "and completions are counted where the proxy posts and polls them (ibv_post_send, ibv_poll_cq), periods in which a "
        "limit held a control group back by the kernel (nr_throttled, cpu.stat).",
        "tests/unit/engine/test_beside.py::test_who_is_named_for_standing_still_and_is_held_back_is_shown_so",
        "tests/unit/engine/test_beside.py::test_limits_of_others_or_that_hold_nobody_back_are_not_told",
    ),
)  # fmt: skip


def markdown(rules: Sequence[Rule] = RULES, *, short: bool = False) -> Iterator[str]:
    """The table as Markdown, a row a rule. ``short``: without what each defeats and the tests that hold it."""
    head = ["rule", "when", "concludes", *([] if short else ["defeats"]), "why it is true"]
    head += [] if short else ["needed for", "must leave alone"]
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for rule in rules:
        says = " ".join((rule.apply.__doc__ or "").split("\n\n")[0].split())
        cells = [f"`{rule.id}`", rule.stratum.name.lower(), says, rule.derivation]
        if not short:
            cells.insert(3, ", ".join(f"`{one.id}`" for one in rules if one.id in rule.defeats))
            cells += [rule.recording, rule.near_miss]
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


if __name__ == "__main__":
    print("\n".join(markdown(short="--short" in sys.argv)))
