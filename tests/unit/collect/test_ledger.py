"""The ledger and the alignment of ranks that were attached at different times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ncclwatch.collect.alignment import Entries, line_up
from ncclwatch.collect.ledger import UNCOUNTED, Ledger
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind

COMM = 0x1234


def rows_of(ledger: Ledger) -> dict[int, int]:
    """Rank → row: here rank r is process 1000 + r."""
    return {pid - 1000: row for (_, pid, _), row in ledger.rows.items()}


def calls(rank: int, counts: list[int], *, op_count: list[int] | None = None, start_ns: int = 1000) -> NDArray[Any]:
    """AllReduce calls of one rank, one a microsecond."""
    events = np.zeros(len(counts), EVENT_DTYPE)
    events["time_ns"] = start_ns + np.arange(len(counts)) * 1000
    events["kind"], events["flags"] = Kind.ENTER, Flag.COMM_READ
    events["function"], events["comm_hash"], events["rank"], events["nranks"] = Function.ALL_REDUCE, COMM, rank, 4
    events["count"], events["datatype"], events["peer"], events["comm"], events["pid"] = counts, 7, -1, COMM, 1000 + rank
    events["op_count"] = op_count if op_count is not None else 0
    return events


def birth(rank: int) -> NDArray[Any]:
    """The record of a communicator's creation being left."""
    events = np.zeros(1, EVENT_DTYPE)
    events["kind"], events["flags"], events["function"] = Kind.LEAVE, Flag.COMM_READ, Function.COMM_INIT_RANK_CONFIG
    events["comm"], events["pid"], events["rank"], events["nranks"] = COMM, 1000 + rank, rank, 4
    return events


def in_line(ledger: Ledger) -> Entries:
    return line_up(ledger, [rows_of(ledger)])


PROVEN, GUESSED = True, False


def how(entries: Entries) -> list[bool | None]:
    """What put each rank into line: a count that proves it, or ``opCount``; ``None``: nothing."""
    return [proven if aligned else None for proven, aligned in zip(entries.proven.tolist(), entries.aligned, strict=True)]


def test_operations_are_kept_in_the_order_called_across_batches_and_ranks() -> None:
    ledger = Ledger(depth=8)
    mixed = np.concatenate([calls(0, [10, 11, 12]), calls(1, [10, 11])])
    assert ledger.add_calls(mixed[np.argsort(mixed["time_ns"], kind="stable")]) == 5
    assert ledger.add_calls(calls(0, [13, 14])) == 2
    rows = rows_of(ledger)
    first, operations = ledger.history(rows[0])
    assert (first, operations["count"].tolist()) == (0, [10, 11, 12, 13, 14])
    assert ledger.history(rows[1])[1]["count"].tolist() == [10, 11]


def test_only_the_newest_survive_in_a_full_ring_even_from_one_batch() -> None:
    ledger = Ledger(depth=4)
    ledger.add_calls(calls(0, list(range(23))))
    first, operations = ledger.history(ledger.rows["", 1000, COMM])
    assert (first, operations["count"].tolist()) == (19, [19, 20, 21, 22])
    assert ledger.signature(0, 18) is None
    signature = ledger.signature(0, 22)
    assert signature is not None and signature.count == 22 and "AllReduce" in signature.text()
    assert ledger.signature(0, 23) is None


def test_rows_grow_and_are_bounded() -> None:
    ledger = Ledger(depth=2, max_rows=100)
    for rank in range(101):
        ledger.add_calls(calls(rank, [1]))
    assert len(ledger.rows) == 100


def test_leaves_group_calls_and_unread_communicators_are_no_operations() -> None:
    ledger = Ledger()
    events = np.concatenate([calls(0, [1, 2, 3, 4])])
    events["kind"][0] = Kind.LEAVE
    events["function"][1] = Function.GROUP_END
    events["flags"][2] = 0
    assert ledger.add_calls(events) == 1


def test_ranks_seen_from_birth_need_no_counter() -> None:
    ledger = Ledger()
    for rank in (0, 1):
        ledger.add_calls(birth(rank))
        ledger.add_calls(calls(rank, [5]))
    entries = in_line(ledger)
    assert how(entries) == [PROVEN, PROVEN]
    assert entries.end(1) == 1


def test_late_attached_ranks_are_aligned_by_a_launch_counter_that_proves_itself() -> None:
    ledger = Ledger()
    sizes = [100, 200, 300] * 5
    ledger.add_calls(calls(0, sizes, op_count=list(range(40, 55))))
    ledger.add_calls(calls(1, sizes[4:], op_count=list(range(44, 55))))
    entries = in_line(ledger)
    assert how(entries) == [GUESSED, GUESSED]
    assert entries.offsets.tolist() == [40, 44] and entries.end(0) == entries.end(1) == 55


def test_a_counter_that_counts_only_some_plans_aligns_nobody() -> None:
    """2.27.3 to 2.30.7: a rank without proxy work does not count, so its counter stands still."""
    ledger = Ledger()
    sizes = [100, 200, 300] * 5
    ledger.add_calls(calls(0, sizes, op_count=list(range(40, 55))))
    ledger.add_calls(calls(1, sizes, op_count=[0] * 15))
    assert how(in_line(ledger))[1] is None


def test_a_counter_under_which_signatures_disagree_is_refused() -> None:
    ledger = Ledger()
    ledger.add_calls(calls(0, [100, 200, 300] * 5, op_count=list(range(40, 55))))
    ledger.add_calls(calls(1, [200, 300, 100] * 5, op_count=list(range(40, 55))))
    assert how(in_line(ledger)) == [None, None]


def test_one_inconsistent_operation_at_the_end_keeps_the_alignment() -> None:
    ledger = Ledger()
    ledger.add_calls(calls(0, [100, 200, 300, 400], op_count=[4, 5, 6, 7]))
    ledger.add_calls(calls(1, [100, 200, 300, 999], op_count=[4, 5, 6, 7]))
    assert how(in_line(ledger)) == [GUESSED] * 2


def test_sequence_numbers_of_nccl_give_the_offset_outright() -> None:
    ledger = Ledger()
    sizes = [100, 200, 300] * 5
    ledger.add_calls(calls(0, sizes))
    ledger.add_calls(calls(1, sizes[3:]))
    rows = rows_of(ledger)
    for row in rows.values():
        ledger.note_count(row, 115, 10**6)
    entries = in_line(ledger)
    assert how(entries) == [PROVEN] * 2
    assert entries.offsets.tolist() == [100, 103] and entries.end(0) == entries.end(1) == 115


def test_a_communicator_born_at_an_address_used_before_starts_anew() -> None:
    ledger = Ledger()
    ledger.add_calls(calls(0, [1, 2, 3]))
    ledger.add_calls(birth(0))
    ledger.add_calls(calls(0, [9]))
    assert ledger.history(ledger.rows["", 1000, COMM])[1]["count"].tolist() == [9]


def test_equal_pids_of_two_nodes_are_two_rows() -> None:
    ledger = Ledger()
    ledger.add_calls(calls(0, [1, 2]), source="a")
    ledger.add_calls(calls(0, [3]), source="b")
    assert ledger.history(ledger.rows[ledger.place("a", 1000, COMM)])[1]["count"].tolist() == [1, 2]
    assert ledger.history(ledger.rows[ledger.place("b", 1000, COMM)])[1]["count"].tolist() == [3]
    assert ledger.place("c", 1000, COMM) not in ledger.rows


def test_after_a_loss_the_rows_of_that_node_start_anew_and_line_up_again() -> None:
    ledger = Ledger()
    sizes = [100, 200, 300] * 5
    for rank in (0, 1):
        ledger.add_calls(birth(rank), source="a")
        ledger.add_calls(calls(rank, sizes, op_count=list(range(15))), source="a", lost=rank)
    rows = {rank: ledger.rows[ledger.place("a", 1000 + rank, COMM)] for rank in (0, 1)}
    assert how(line_up(ledger, [rows])) == [None, None]
    ledger.add_calls(calls(0, sizes, op_count=list(range(20, 35))), source="a")
    ledger.add_calls(calls(1, sizes[3:], op_count=list(range(23, 35))), source="a")
    entries = line_up(ledger, [rows])
    assert how(entries)[1] is GUESSED
    assert entries.offsets.tolist() == [20, 23] and entries.end(0) == entries.end(1) == 35


def test_after_a_loss_no_messages_are_counted_of_that_node_on_which_communicator_ever() -> None:
    ledger = Ledger()
    for source in ("a", "b"):
        sends = calls(0, [8, 8])
        sends["function"], sends["peer"] = Function.SEND, 1
        ledger.add_calls(sends, source=source)
    assert len(ledger.point_to_point) == 2 and not ledger.rows
    ledger.lose("a")
    assert list(ledger.point_to_point) == [("b", 1000, COMM)]


def test_small_jobs_keep_more_and_the_newest_survive_growth() -> None:
    ledger = Ledger()
    ledger.add_calls(calls(0, list(range(2000))))
    assert len(ledger.history(0)[1]) == ledger.depth == 1024
    for rank in range(1, 3000):
        ledger.add_calls(calls(rank, [rank]))
    first, operations = ledger.history(0)
    assert ledger.operations.nbytes <= 40 << 20
    assert (first + len(operations), operations["count"].tolist()) == (2000, list(range(2000 - ledger.depth, 2000)))


def test_rows_of_a_process_that_ended_are_used_again() -> None:
    ledger = Ledger()
    ledger.add_calls(calls(0, [1, 2, 3]))
    ledger.add_calls(calls(1, [1]))
    ledger.forget({("", 1000)})
    assert list(ledger.rows) == [("", 1001, COMM)]
    ledger.add_calls(calls(2, [7]))
    assert ledger.history(ledger.rows["", 1002, COMM])[1]["count"].tolist() == [7]
    assert len(ledger.called) == 64


@pytest.mark.parametrize("called", [0, 1, 5, 256, 300])
def test_a_count_of_nccl_is_compared_with_what_was_called_when_it_was_read(called: int) -> None:
    ledger = Ledger(depth=256)
    ledger.add_calls(calls(0, [1] * max(called, 1)))
    row = rows_of(ledger)[0]
    if not called:
        ledger.lose("")
    _, kept = ledger.history(row)
    for time_ns in (0, *(int(t) + shift for t in kept["time_ns"] for shift in (-1, 0, 1))):
        newer = int(np.count_nonzero(kept["time_ns"] > time_ns))
        ledger.before[row] = UNCOUNTED
        ledger.note_count(row, 1000, time_ns)
        assert ledger.before[row] == (1000 - (called - newer) if newer < len(kept) else UNCOUNTED)
