"""What the calls plane says about a standstill: who has not called what the others have (H1), who called something else (H2).

Host call time is not GPU time: a rank that has called an operation need not have begun it. So the calls plane names ranks that
did *not* call, and ranks whose call differs; what happens after the call is the state plane's business.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from ncclwatch.engine.alignment import Alignment, align
from ncclwatch.engine.ledger import Ledger, Signature


@dataclass(slots=True)
class CallsFinding:
    """Comparison of the aligned ranks of one communicator.

    ``behind``: ranks that have not called operation ``sequence`` while at least one other has. ``groups``: where the first
    inconsistent operation was found, its signatures with the ranks that called each. ``unaligned``: ranks that nothing can be
    said about.
    """

    sequence: int | None = None
    called: Signature | None = None
    behind: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    groups: dict[Signature, list[int]] = field(default_factory=dict)
    unaligned: list[int] = field(default_factory=list)

    @property
    def inconsistent(self) -> bool:
        """Whether ranks called different things under the same sequence number."""
        return len(self.groups) > 1


def compare_calls(ledger: Ledger, rows: dict[int, int], totals: dict[int, tuple[int, int]] | None = None) -> CallsFinding:
    """Compare what the ranks of a communicator have called; arguments as of :func:`alignment.align`. O(ranks x depth)."""
    alignment = align(ledger, rows, totals)
    finding = CallsFinding(unaligned=sorted(set(rows) - set(alignment.offsets)))
    following = {rank: alignment.offsets[rank] + int(ledger.called[rows[rank]]) for rank in alignment.offsets}
    if len(following) < 2:
        return finding
    _find_inconsistency(ledger, alignment, rows, following, finding)
    slowest, fastest = min(following.values()), max(following.values())
    if slowest < fastest:
        # The operation that holds the group up is the one the slowest has not called.
        finding.sequence = slowest
        finding.behind = sorted(rank for rank, after in following.items() if after == slowest)
        finding.waiting = sorted(rank for rank, after in following.items() if after > slowest)
        leader = finding.waiting[0]
        finding.called = ledger.signature(rows[leader], slowest - alignment.offsets[leader])
    return finding


def _find_inconsistency(
    ledger: Ledger, alignment: Alignment, rows: dict[int, int], following: dict[int, int], finding: CallsFinding
) -> None:
    oldest = max(after - min(ledger.depth, int(ledger.called[rows[rank]])) for rank, after in following.items())
    for sequence in range(oldest, max(following.values())):
        groups: dict[Signature, list[int]] = defaultdict(list)
        for rank in following:
            signature = ledger.signature(rows[rank], sequence - alignment.offsets[rank])
            if signature is not None:
                groups[signature].append(rank)
        if len(groups) > 1:
            finding.groups = {signature: sorted(ranks) for signature, ranks in groups.items()}
            finding.sequence = sequence
            return
