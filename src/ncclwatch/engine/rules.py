"""The rules of the hang diagnosis: one ordered table. ``python -m ncclwatch.engine.rules`` prints it as Markdown.

Rules of one stratum run in the order of the table. RETRACT and FOLLOW take turns until neither changes the graph. Hypotheses are
weighed in the order of the table: one stands until a rule that defeats its rule concludes another. Nothing else decides which of
two explanations is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from ncclwatch.engine import beside, explain_calls, explain_network, explain_waits, retract, stated, unobservable_waits
from ncclwatch.engine.case import Case
from ncclwatch.engine.edges import StallMark, Wait
from ncclwatch.engine.hypotheses import Hypothesis, Retraction


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


Conclusion = Wait | StallMark | Retraction | Hypothesis


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


UNCERTAIN = frozenset({"nothing-open", "nothing-seen", "unseen", "beside-absent"})
"""Rules that name nobody, since too little was seen."""
FROM_ENDS = UNCERTAIN | {"link", "cut-off", "rank-stalled", "rank-not-entered"}
COUNTED = frozenset({"counts-tie", "counts-differ"})
FROM_CYCLES = frozenset({"order", "cycle-in-operation", "cycle-of-calls", "lacks-call", "lacks-other-call"})
FROM_MEMORY = (
    FROM_ENDS | FROM_CYCLES | {"counts-tie", "counts-differ", "open-calls-unseen", "open-calls-tie", "open-calls-differ"}
)
TIES = frozenset({"counts-tie", "open-calls-tie", "calls-tie"})
FROM_CALLS = frozenset({"not-called", "calls-differ", "left-out"})
DISAGREE = COUNTED | {"open-calls-tie", "open-calls-differ"}
OPEN_TO_DOUBT = (FROM_MEMORY | FROM_CALLS) - DISAGREE - {"nothing-open"}
"""Where the waits or the calls that can be seen end: a port or a path below that may be why."""
UNLESS_STATED = OPEN_TO_DOUBT | TIES | DISAGREE | {"nothing-open", "nccl-error"}


def only(rule: str, apply: Callable[[Case], Iterable[Hypothesis]]) -> Callable[[Case], Iterable[Hypothesis]]:
    """Of what is concluded only what this rule concludes."""
    return lambda case: (found for found in apply(case) if found.rule == rule)


def table() -> tuple[Rule, ...]:
    """All rules in their order."""
    s, u, r, w, c = stated, unobservable_waits, retract, explain_waits, explain_calls
    return (
        Rule("all-ended", Stratum.STATED, s.all_ended, "", "", ""),
        Rule("one-sample", Stratum.STATED, s.one_sample, "", "", ""),
        Rule("progress", Stratum.STATED, s.progress, "", "", ""),
        Rule("stopped", Stratum.STATED, s.stopped, "", "", ""),
        Rule("ended", Stratum.STATED, s.ended, "", "", ""),
        Rule("creating", Stratum.STATED, only("creating", s.creation), "", "", ""),
        Rule("not-joined", Stratum.STATED, only("not-joined", s.creation), "", "", ""),
        Rule("calls-not-made", Stratum.DRAW, u.calls_not_made, "", "", ""),
        Rule("counted-less", Stratum.DRAW, u.counted_less, "", "", ""),
        Rule("messages-owed", Stratum.DRAW, u.messages_owed_by_all, "", "", ""),
        Rule("pause", Stratum.PATIENCE, s.pause, "", "", ""),
        Rule("rest", Stratum.PATIENCE, s.rest, "", "", ""),
        Rule("not-begun", Stratum.RETRACT, r.not_begun, "", "", ""),
        Rule("data-at-hand", Stratum.RETRACT, r.data_at_hand, "", "", ""),
        Rule("called-later", Stratum.RETRACT, r.called_later, "", "", ""),
        Rule("not-completing", Stratum.RETRACT, r.not_completing, "", "", ""),
        Rule("behind-in-ring", Stratum.RETRACT, r.behind_in_ring, "", "", ""),
        Rule("called-less", Stratum.FOLLOW, u.called_less, "", "", ""),
        Rule("hidden-peer", Stratum.FOLLOW, u.hidden_peer, "", "", ""),
        Rule("message-owed", Stratum.FOLLOW, u.message_owed, "", "", ""),
        Rule("message-possible", Stratum.FOLLOW, u.message_possible, "", "", ""),
        Rule("ring-before", Stratum.FOLLOW, u.ring_before, "", "", ""),
        Rule("dropped-operation", Stratum.FOLLOW, u.dropped_operation, "", "", ""),
        Rule("nccl-error", Stratum.EXPLAIN, s.nccl_error, "", "", ""),
        Rule("nothing-seen", Stratum.EXPLAIN, s.nothing_seen, "", "", ""),
        Rule("nothing-open", Stratum.EXPLAIN, s.nothing_open, "", "", ""),
        Rule("unseen", Stratum.EXPLAIN, w.unseen, "", "", ""),
        Rule("link", Stratum.EXPLAIN, w.link, "", "", "", frozenset({"unseen"})),
        Rule("cut-off", Stratum.EXPLAIN, w.cut_off, "", "", "", frozenset({"unseen"})),
        Rule("beside-absent", Stratum.EXPLAIN, w.beside_absent, "", "", "", frozenset({"unseen", "link", "cut-off"})),
        Rule("rank-stalled", Stratum.EXPLAIN, w.rank_stalled, "", "", "", FROM_ENDS - {"rank-stalled", "rank-not-entered"}),
        Rule("rank-not-entered", Stratum.EXPLAIN, w.rank_not_entered, "", "", "", FROM_ENDS - {"rank-not-entered"}),
        Rule("order", Stratum.EXPLAIN, w.order, "", "", "", FROM_ENDS),
        Rule("cycle-in-operation", Stratum.EXPLAIN, w.cycle_in_operation, "", "", "", FROM_ENDS),
        Rule("cycle-of-calls", Stratum.EXPLAIN, w.cycle_of_calls, "", "", "", FROM_ENDS | {"order"}),
        Rule("lacks-call", Stratum.EXPLAIN, w.lacks_call, "", "", "", FROM_ENDS | {"order"}),
        Rule("lacks-other-call", Stratum.EXPLAIN, w.lacks_other_call, "", "", "", FROM_ENDS | {"order"}),
        Rule("counts-differ", Stratum.EXPLAIN, c.counts_differ, "", "", "", FROM_ENDS | FROM_CYCLES),
        Rule("counts-tie", Stratum.EXPLAIN, c.counts_tie, "", "", "", FROM_ENDS | FROM_CYCLES),
        Rule(
            "open-calls-unseen",
            Stratum.EXPLAIN,
            c.open_calls_unseen,
            "",
            "",
            "",
            FROM_ENDS | FROM_CYCLES | COUNTED,
        ),
        Rule(
            "open-calls-differ",
            Stratum.EXPLAIN,
            c.open_calls_differ,
            "",
            "",
            "",
            FROM_ENDS | FROM_CYCLES | COUNTED,
        ),
        Rule(
            "open-calls-tie",
            Stratum.EXPLAIN,
            c.open_calls_tie,
            "",
            "",
            "",
            FROM_ENDS | FROM_CYCLES | COUNTED,
        ),
        Rule(
            "not-called",
            Stratum.EXPLAIN,
            c.not_called,
            "",
            "",
            "",
            UNCERTAIN | {"nccl-error", "cycle-in-operation", "cycle-of-calls", "open-calls-unseen"},
        ),
        Rule("calls-differ", Stratum.EXPLAIN, c.calls_differ, "", "", "", FROM_MEMORY | {"nccl-error"}),
        Rule("calls-tie", Stratum.EXPLAIN, c.calls_tie, "", "", "", FROM_MEMORY | {"nccl-error"}),
        Rule(
            "ended-behind", Stratum.EXPLAIN, s.ended_behind, "", "", "", FROM_MEMORY | {"not-called", "calls-differ", "calls-tie"}
        ),
        Rule("calls-beside", Stratum.QUALIFY, c.calls_beside, "", "", ""),
        Rule(
            "left-out",
            Stratum.QUALIFY,
            c.left_out,
            "",
            "",
            "",
            TIES | UNCERTAIN | FROM_CYCLES - {"lacks-other-call"} | {"rank-not-entered", "not-called", "open-calls-unseen"},
        ),
        *_network_rules(),
        *_beside_rules(),
    )


def _network_rules() -> tuple[Rule, ...]:
    """What ports, paths and TCP say of the hypothesis that stands."""
    n, qualify = explain_network, Stratum.QUALIFY
    return (
        Rule(
            "port-down", qualify, n.port_down,
            "A link cut while nothing is under way leaves no trace in memory, and proxies drop what their transport reports as "
            "failed (progressOps, src/proxy.cc): a port that went down with the job says more than where the waits end.",
            "tests/unit/engine/test_explain_network.py::test_a_port_that_went_down_when_the_job_came_to_stand_is_the_cause",
            "tests/unit/engine/test_explain_network.py::test_a_port_that_has_nothing_to_do_with_it_changes_nothing",
            OPEN_TO_DOUBT,
        ),
        Rule(
            "port-end", qualify, n.port_end,
            "Both ends of a dead link are named for want of anything better: the port of one being down decides between them.",
            "tests/unit/engine/test_explain_network.py::test_of_a_link_that_carries_nothing_the_end_whose_port_is_down_is_kept",
            "the same test: a port of another rank",
            frozenset({"link"}),
        ),
        Rule(
            "tcp-slow", qualify, n.tcp_slow,
            "TCP waits twice as long after each loss (Linux, TCP_RTO_MIN 0.2 s): a link that loses much stands still for many "
            "seconds, and comes through.",
            "tests/unit/engine/test_live.py::test_a_link_that_loses_much_is_slow_until_tcp_has_tried_once_more",
            "the same test: once TCP has tried",
            frozenset({"link", "cut-off"}),
        ),
        Rule(
            "tcp-pause", qualify, n.tcp_pause,
            "As tcp-slow: what else the waits show may be over once the lost segment is sent again.",
            "tests/unit/engine/test_live.py::test_a_link_whose_sockets_try_again_is_given_their_time",
            "the same test: another link's sockets",
            UNLESS_STATED,
        ),
        Rule(
            "path-dead", qualify, n.path_dead,
            "Whoever has only stopped reading still acknowledges (RFC 9293, 3.8.6): segments that are sent five times without an "
            "answer are the network's doing.",
            "tests/unit/engine/test_explain_network.py::test_what_several_dead_paths_share_is_named",
            "tests/unit/engine/test_explain_network.py::test_paths_that_prove_nothing_here_change_nothing",
            OPEN_TO_DOUBT | {"tcp-pause"},
        ),
        Rule(
            "path-cut-off", qualify, n.path_cut_off,
            "As path-dead: of a rank that data neither reaches nor leaves, proxy and network are told apart by TCP.",
            "tests/unit/engine/test_explain_network.py::test_of_who_is_cut_off_it_is_said_that_the_network_is_why",
            "the same test: a path of other ranks",
            frozenset({"cut-off"}),
        ),
    )  # fmt: skip


def _beside_rules() -> tuple[Rule, ...]:
    """What CPU limits, GPUs and the number of samples say of whatever stands."""
    b = beside
    network = {"port-down", "port-end", "path-dead", "path-cut-off"}
    behind = {"link", "cut-off", "rank-stalled", "rank-not-entered", "lacks-call", "lacks-other-call"}
    accusing = behind | network | FROM_CALLS | TIES | {"order", "counts-differ", "open-calls-differ", "nccl-error", "tcp-slow"}
    return (
        Rule(
            "crawls", Stratum.QUALIFY, b.crawls,
            "A process runs in each period of its CPU limit (cpu.max, 100 ms): it crawls, and does not hang.",
            "tests/unit/engine/test_beside.py::test_who_is_held_back_alone_is_given_longer_before_that_is_a_hang",
            "the same test: limits of others, of everybody, or that hold back little",
            frozenset(behind | network | FROM_CALLS),
        ),
        Rule(
            "newcomers", Stratum.BESIDE, b.newcomers,
            "Progress is told by comparing two samples of a process.",
            "tests/unit/engine/test_diagnose.py",
            "a job of which all processes were sampled twice",
            frozenset(accusing | {"stopped", "ended", "not-joined", "ended-behind"}),
        ),
        Rule(
            "gpu", Stratum.BESIDE, b.gpus,
            "The shim in the process reports which kernels have begun and ended (ncclProfiler, src/plugin/profiler.cc).",
            "tests/unit/engine/evidence/test_device.py::test_a_gpu_that_stands_in_the_kernel_is_hardware",
            "tests/unit/engine/evidence/test_device.py::test_a_stopped_process_is_not_said_to_be_in_a_kernel",
        ),
        Rule(
            "cpu-limit", Stratum.BESIDE, b.limited,
            "The kernel counts the periods in which a limit held a control group back (nr_throttled, cpu.stat).",
            "tests/unit/engine/test_beside.py::test_who_is_named_for_standing_still_and_is_held_back_is_shown_so",
            "tests/unit/engine/test_beside.py::test_limits_of_others_or_that_hold_nobody_back_are_not_told",
        ),
    )  # fmt: skip


RULES = table()
