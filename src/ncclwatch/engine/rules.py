"""The rules of the hang diagnosis: one ordered table. ``python -m ncclwatch.engine.rules`` prints it as Markdown.

RETRACT and FOLLOW take turns until neither changes the graph. Hypotheses are weighed in the order of the table: one stands until
a rule that defeats its rule concludes another, or any names somebody where it names nobody. Nothing else decides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from ncclwatch.engine import beside, explain_calls, explain_network, explain_waits, redraw, stated
from ncclwatch.engine.case import Case, Conclusion


class Stratum(IntEnum):
    """When a rule runs.

    STATED: what the operating system or NCCL states outright needs no patience, and ends the inference. DRAW: waits that
    follow from calls and counts, of every rank. PATIENCE: whether nothing has moved for long enough to accuse anybody of
    waiting; if not, that ends the inference. RETRACT: waits that count no longer, as they are not begun. FOLLOW: weaker waits,
    of ranks at which the waits end: whom such a rank may wait for itself, unseen. EXPLAIN: hypotheses from where the waits
    end, and from what was called. QUALIFY: what other evidence says of the one that stands: a pattern of calls, a port that is
    down, a CPU limit. BESIDE: what is told beside whatever stands, those of the first strata included.
    """

    STATED = 1
    DRAW = 2
    PATIENCE = 3
    RETRACT = 4
    FOLLOW = 5
    EXPLAIN = 6
    QUALIFY = 7
    BESIDE = 8


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``derivation``: why it is true (NCCL source with tag, paper section). ``defeats`` names earlier rules only, so
    that it is acyclic (tested). ``breaks_ties``: it defeats, too, what names all sides of a disagreement for want of anything
    better. What each is needed for, and what it must leave alone, stands in ``test_rules.py``.
    """

    id: str
    stratum: Stratum
    apply: Callable[[Case], Iterable[Conclusion]]
    derivation: str
    defeats: frozenset[str] = frozenset()
    breaks_ties: bool = False


FROM_ENDS = frozenset({"link", "rank-behind", "inside-node"})
FROM_MEMORY = FROM_ENDS | {"nothing-open", "cycle", "counts-differ", "open-calls-differ"}
FROM_CALLS = frozenset({"not-called", "calls-differ", "left-out"})
OPEN_TO_DOUBT = FROM_ENDS | FROM_CALLS | {"cycle"}
"""Where the waits or the calls that can be seen end: a port or a path below that may be why."""
NETWORK = frozenset({"network-down", "network-end"})

RULES = (
    Rule("all-ended", Stratum.STATED, stated.all_ended, "The run state of each process is Z or X (/proc/PID/stat)."),
    Rule("one-sample", Stratum.STATED, stated.one_sample, "Progress is told by comparing two samples of a process."),
    Rule("progress", Stratum.STATED, stated.progress, "A counter of NCCL moved between the last two samples: the job goes on."),
    Rule("halted", Stratum.STATED, stated.halted,
         "State T or t in /proc/PID/stat of two samples: no thread of it runs. Or it is gone from its host, and a collective "
         "of its communicator stands still: none can end without every rank."),
    Rule("creation", Stratum.STATED, stated.creation,
         "initState of a communicator that is not ncclSuccess yet; NCCL sets hash, rank and size before the ranks meet "
         "(ncclCommInitRankFunc, src/init.cc): who is missing can be read while creation hangs."),
    Rule("calls-not-made", Stratum.DRAW, redraw.calls_not_made,
         "A collective ends on no rank before all have called it; memory shows no transfer of the waiter that would say "
         "otherwise."),
    Rule("counted-less", Stratum.DRAW, redraw.counted_less,
         "seqNumber counts calls of each collective on each rank from 2.26 on (ncclComm.seqNumber)."),
    Rule("messages-owed", Stratum.DRAW, redraw.messages_owed_by_all,
         "A Send ends once its Recv is called: calls of both ranks since their newest common collective are compared."),
    Rule("pause", Stratum.PATIENCE, stated.pause,
         "A checkpoint, an evaluation or a first iteration stands still as well: twice the longest standstill of this "
         "operation that ended."),
    Rule("not-begun", Stratum.RETRACT, redraw.not_begun,
         "A GPU is in one operation of a stream, but proxies open the receives of all that is called. A ring begins with a "
         "send (src/device/all_reduce.h): no send produced, not begun. Ranks run one program: what a peer has open as well "
         "did not keep that peer from the collective it is amid."),
    Rule("not-completing", Stratum.RETRACT, redraw.not_completing,
         "The adapter acknowledges what it takes (reliable connection; ncclIbTest, src/transport/net_ib.cc): only the sender's "
         "proxy is left to move."),
    Rule("behind-in-ring", Stratum.RETRACT, redraw.behind_in_ring,
         "All ranks of a ring write the same number of steps an operation, and nobody ends it before the last has contributed."),
    Rule("called-less", Stratum.FOLLOW, redraw.called_less,
         "opCount and seqNumber count what was launched: who has called more waits for who has called less."),
    Rule("hidden-peer", Stratum.FOLLOW, redraw.hidden_peer,
         "Counters of NVLink lie in GPU memory: a rank that shows nothing may wait for a peer that waits itself."),
    Rule("message-owed", Stratum.FOLLOW, redraw.message_owed, "As messages-owed, for a rank with nothing open."),
    Rule("message-possible", Stratum.FOLLOW, redraw.message_possible,
         "A rank whose calls do not tell, or that nobody recorded, may wait in a receive: it is not accused of standing idle."),
    Rule("ring-before", Stratum.FOLLOW, redraw.ring_before,
         "AllReduce, AllGather and ReduceScatter write and read as much on each ring: who has read less is in one of them."),
    Rule("dropped-operation", Stratum.FOLLOW, redraw.dropped_operation,
         "A proxy drops an operation whose transport reports an error, from 2.22 on without a word (progressOps, "
         "src/proxy.cc)."),
    Rule("nothing-open", Stratum.EXPLAIN, stated.nothing_open,
         "No proxy has an operation, no shared memory holds unread data. asyncResult of a communicator is an error: NCCL has "
         "given it up. What NVLink joins has no counters that the host can read."),
    Rule("unseen", Stratum.EXPLAIN, explain_waits.unseen,
         "Absence of records proves nothing: waits that end where nobody looked, or at a rank that may wait for one nobody "
         "observed, accuse nobody."),
    Rule("inside-node", Stratum.EXPLAIN, explain_waits.inside_node,
         "A tree adds up towards its root, a ring begins with a rank's own part (src/device/): a GPU that has sent nothing waits "
         "for those behind it in its node alone.", frozenset({"unseen"})),
    Rule("link", Stratum.EXPLAIN, explain_waits.link,
         "Steps at both ends (src/transport/net.cc): handed to the network by one, not arrived at the other, and both proxies "
         "run. Several links do not die at once."),
    Rule("rank-behind", Stratum.EXPLAIN, explain_waits.rank_behind,
         "CCL-D H1: others wait in an operation that this rank's host has not called, or its GPU has not started. Mycroft, "
         "table 4: it is in it, all it needs is there, and its GPU or its proxy does not go on.", frozenset({"link"})),
    Rule("cycle", Stratum.EXPLAIN, explain_waits.cycle,
         "A cycle of waits through several communicators has no other end than the order in which they were called. Hosts that "
         "run ahead have called everything: where one alone has a call to make, the others are ahead of it. As many calls, "
         "another operation: CCL-D H2.", FROM_ENDS | {"unseen"}),
    Rule("counts-differ", Stratum.EXPLAIN, explain_calls.counts_differ,
         "Of ranks that call the same in one order none is ahead in one collective and behind in another (seqNumber, 2.26 on). "
         "CCL-D H2: a tie is a tie.", FROM_ENDS | {"cycle"}),
    Rule("open-calls-differ", Stratum.EXPLAIN, explain_calls.open_calls_differ,
         "Both ends of a connection round the same running step (src/transport/net.cc): other begins or ends are other "
         "operations.", FROM_ENDS | {"cycle", "counts-differ"}),
    Rule("not-called", Stratum.EXPLAIN, explain_calls.not_called,
         "CCL-D H1 by calls: the others have called it, and this rank waits for nobody.", frozenset({"nothing-open"})),
    Rule("calls-differ", Stratum.EXPLAIN, explain_calls.calls_differ,
         "CCL-D H2 by calls: NCCL does not compare what ranks call under one number.", FROM_MEMORY),
    Rule("ended-behind", Stratum.EXPLAIN, stated.ended_behind,
         "As `halted`, where a followed wait leads to the rank.", FROM_MEMORY | {"not-called", "calls-differ"}),
    Rule("left-out", Stratum.QUALIFY, explain_calls.left_out,
         "A job calls the same in the same order again and again: who has left a call out is one behind in all that follows.",
         frozenset({"cycle", "rank-behind", "not-called"}), breaks_ties=True),
    Rule("network-down", Stratum.QUALIFY, explain_network.network_down,
         "A link cut while nothing is under way leaves no trace in memory, and proxies drop what their transport reports as "
         "failed (progressOps, src/proxy.cc). Whoever has only stopped reading still acknowledges (RFC 9293, 3.8.6): segments "
         "that are sent five times without an answer are the network's doing.", OPEN_TO_DOUBT),
    Rule("tcp-slow", Stratum.QUALIFY, explain_network.tcp_slow,
         "TCP waits twice as long after each loss (Linux, TCP_RTO_MIN 0.2 s): a link that loses much stands still for many "
         "seconds, and comes through.", frozenset({"link"})),
    Rule("network-end", Stratum.QUALIFY, explain_network.network_end,
         "Both ends of a dead link are named for want of anything better: the port of one being down decides between them. TCP "
         "tells proxy and network apart; so do completions: an adapter completes what the other acknowledges, and a proxy with "
         "requests under way polls for it without pause (ncclIbTest, src/transport/net_ib.cc).", frozenset({"link"})),
    Rule("crawls", Stratum.QUALIFY, explain_network.crawls,
         "A process runs in each period of its CPU limit (cpu.max, 100 ms): it crawls, and does not hang.",
         NETWORK | FROM_CALLS | FROM_ENDS | {"cycle"}),
    Rule("conflict", Stratum.BESIDE, explain_calls.conflict,
         "NCCL compares nothing: as long as as many messages go as are waited for, the job goes on with what it got. Lined up by "
         "counts that need no guess, ranks agree again, or never and in no other place: nobody else calls what they call."),
    Rule("newcomers", Stratum.BESIDE, beside.newcomers,
         "Progress is told by comparing two samples of a process.",
         FROM_MEMORY | FROM_CALLS | NETWORK | {"tcp-slow", "halted", "creation", "ended-behind"}),
    Rule("planes-beside", Stratum.BESIDE, beside.planes_beside,
         "The shim in the process reports which kernels have begun and ended (ncclProfiler, src/plugin/profiler.cc). Requests "
         "and completions are counted where the proxy posts and polls them (ibv_post_send, ibv_poll_cq), periods in which a "
         "limit held a control group back by the kernel (nr_throttled, cpu.stat)."),
)  # fmt: skip


def markdown(*, short: bool = False) -> Iterator[str]:
    """The table as Markdown, a row a rule. ``short``: without what each defeats."""
    yield f"| rule | when | concludes | {'' if short else 'defeats | '}why it is true |"
    yield f"|{' --- |' * (4 if short else 5)}"
    for rule in RULES:
        says = " ".join((rule.apply.__doc__ or "").split("\n\n")[0].split())
        defeats = [] if short else [", ".join(f"`{one.id}`" for one in RULES if one.id in rule.defeats)]
        cells = [f"`{rule.id}`", rule.stratum.name.lower(), says, *defeats, rule.derivation]
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


if __name__ == "__main__":
    print("\n".join(markdown(short="--short" in sys.argv)))
