"""The rules of the hang diagnosis: one ordered table. ``python -m ncclwatch.engine.rules`` prints it as Markdown.

Rules of one stratum run in the order of the table. RETRACT and FOLLOW take turns until neither changes the graph. Hypotheses are
weighed in the order of the table: one stands until a rule that defeats its rule concludes another. Nothing else decides which of
two explanations is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from ncclwatch.engine import explain_calls, explain_waits, retract, stated, unobservable_waits
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
    )


RULES = table()
