"""Line up the operations of ranks that were attached at different times, by a key that is checked and never assumed.

No counter of NCCL lines ranks up by itself: ``opCount`` counts launched plans and in some releases (2.27.3 to 2.30.7) only
those in which this very rank has proxy work. So a key is proposed, and accepted only when the ranks' call signatures agree
under it; else the rank is ``unaligned`` and is never accused on account of its place in the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.ledger import Ledger

AGREEMENT = 0.9
"""Share of common operations whose signatures must agree; one inconsistent operation must not unalign a rank, chance must."""

MINIMUM_COMMON = 3


class AlignedBy(StrEnum):
    """The key that put a rank into line."""

    BIRTH = "seen from the communicator's creation on"
    SEQUENCE_NUMBER = "ncclComm.seqNumber"
    OP_COUNT = "ncclComm.opCount"
    UNALIGNED = "unaligned"


@dataclass(slots=True)
class Alignment:
    """For each rank of a communicator the offset that turns its ordinal (since attach) into the common sequence number."""

    offsets: dict[int, int] = field(default_factory=dict)
    how: dict[int, AlignedBy] = field(default_factory=dict)

    def sequence(self, rank: int, ordinal: int) -> int | None:
        """The common sequence number of a rank's ordinal, or ``None`` for an unaligned rank."""
        offset = self.offsets.get(rank)
        return None if offset is None else offset + ordinal


def align(ledger: Ledger, rows: dict[int, int], totals: dict[int, tuple[int, int]] | None = None) -> Alignment:
    """Line up the ranks of one communicator; ``rows`` maps a rank to its row of the ledger.

    ``totals`` maps a rank to (collectives NCCL had counted in ``seqNumber``, ordinal in the ledger at that moment); it gives
    the offset outright where NCCL keeps it. O(ranks x depth).
    """
    result = Alignment()
    proposals: dict[int, list[tuple[AlignedBy, int]]] = {}
    for rank, row in rows.items():
        offered: list[tuple[AlignedBy, int]] = []
        if ledger.from_birth[row]:
            offered.append((AlignedBy.BIRTH, 0))
        if totals and rank in totals:
            counted, ordinal = totals[rank]
            offered.append((AlignedBy.SEQUENCE_NUMBER, counted - ordinal))
        by_plans = _offset_by_op_count(ledger, row)
        if by_plans is not None:
            offered.append((AlignedBy.OP_COUNT, by_plans))
        proposals[rank] = offered
    for how in (AlignedBy.BIRTH, AlignedBy.SEQUENCE_NUMBER, AlignedBy.OP_COUNT):
        _accept(ledger, rows, proposals, how, result)
    for rank in rows:
        result.how.setdefault(rank, AlignedBy.UNALIGNED)
    return result


def _offset_by_op_count(ledger: Ledger, row: int) -> int | None:
    """Where ``opCount`` rises by one with every collective kept, its difference to the ordinal is the rank's offset."""
    first, operations = ledger.history(row)
    if len(operations) < MINIMUM_COMMON:
        return None
    counts = operations["op_count"].astype(np.int64)
    if not np.all(np.diff(counts) == 1):
        return None
    return int(counts[0]) - first


def _accept(
    ledger: Ledger, rows: dict[int, int], proposals: dict[int, list[tuple[AlignedBy, int]]], how: AlignedBy, result: Alignment
) -> None:
    """Accept the offsets of one key for ranks that agree with those in line already (or with each other)."""
    candidates = {rank: offset for rank, offered in proposals.items() for key, offset in offered if key is how}
    for rank in sorted(candidates):
        if rank in result.offsets:
            continue
        partners = result.offsets or {other: offset for other, offset in candidates.items() if other != rank}
        if any(_agree(ledger, (rows[rank], candidates[rank]), (rows[other], offset)) for other, offset in partners.items()):
            result.offsets[rank] = candidates[rank]
            result.how[rank] = how


def _agree(ledger: Ledger, one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two rows call the same operations where their sequences overlap under the given offsets."""
    (row_a, offset_a), (row_b, offset_b) = one, other
    first_a, operations_a = ledger.history(row_a)
    first_b, operations_b = ledger.history(row_b)
    start = max(first_a + offset_a, first_b + offset_b)
    end = min(first_a + offset_a + len(operations_a), first_b + offset_b + len(operations_b))
    if end - start < MINIMUM_COMMON:
        # Too little in common to check: only a communicator seen from its creation on needs no check.
        return bool(ledger.from_birth[row_a] and ledger.from_birth[row_b])
    part_a = operations_a[start - first_a - offset_a : end - first_a - offset_a]
    part_b = operations_b[start - first_b - offset_b : end - first_b - offset_b]
    same: NDArray[np.bool_] = (
        (part_a["function"] == part_b["function"])
        & (part_a["count"] == part_b["count"])
        & (part_a["datatype"] == part_b["datatype"])
    )
    return bool(np.mean(same) >= AGREEMENT or (np.count_nonzero(~same) == 1 and not same[-1]))
