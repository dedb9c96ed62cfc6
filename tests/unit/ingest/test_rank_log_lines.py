"""Lines of rank logs in columns."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ncclwatch.ingest.rank_log_lines import NOT_COUNTED, numbered, parse
from ncclwatch.model.events import Function

# The line that MegaTrace's documents show.
SHOWN = b"[save_count 2] [1755590106.364857579] [Rank 0] Fun AllReduce Data 1 stream 0x55919d27b4b0 opCount 2\n"
HASHED = (
    b"[save_count 5] [1755877674.248008482] [Rank 31] Fun ReduceScatter Data 2684239872 stream 0x562a9d0b5020 opCount 80123 "
    b"groupHash -5956285979098587305\n"
)


def test_every_column_of_a_line_is_what_it_says() -> None:
    found = parse(SHOWN).lines
    assert found.tolist() == [(1755590106364857579, 0, Function.ALL_REDUCE, 2, 1, 0x55919D27B4B0, 2, 0)]


def test_lines_with_a_hash_stand_beside_lines_without() -> None:
    found = parse(SHOWN + HASHED + SHOWN)
    assert (found.total, found.bad) == (3, 0)
    assert found.lines["rank"].tolist() == [0, 31, 0]
    assert int(found.lines["group_hash"][1]) == (1 << 64) - 5956285979098587305
    assert found.lines[1]["count"] == 2684239872
    assert found.lines[1]["op_count"] == 80123


def test_older_lines_have_neither_a_save_nor_a_count_and_are_counted_by_stream() -> None:
    bare = SHOWN.split(b"] ", 1)[1].split(b" opCount")[0] + b"\n"
    found = parse(bare + bare.replace(b"d27b4b0", b"d27b4b1") + SHOWN.split(b"] ", 1)[1] + bare)
    assert (found.bad, found.lines["save"].tolist()) == (0, [0, 0, 0, 0])
    assert found.lines["op_count"].tolist() == [NOT_COUNTED, NOT_COUNTED, 2, NOT_COUNTED]
    assert numbered(found.lines)["op_count"].tolist() == [0, 0, 2, 1]


def test_numbers_of_every_width_are_read_as_python_reads_them() -> None:
    rng = np.random.default_rng(4)
    rows = []
    for width in range(1, 18):
        values = rng.integers(10 ** (width - 1), 10**width, 3, dtype=np.int64).tolist()
        rows += [(v, int(rng.integers(1, 1 << min(60, 4 * width))), width) for v in values]
    text = "".join(
        f"[save_count {w}] [17{i:08d}.{v % 10**9:09d}] [Rank {i}] Fun Send Data {v} stream {s:#x} opCount {v}\n"
        for i, (v, s, w) in enumerate(rows)
    )
    found = parse(text.encode()).lines
    assert found["count"].tolist() == [v for v, _, _ in rows]
    assert found["op_count"].tolist() == [v for v, _, _ in rows]
    assert found["stream"].tolist() == [s for _, s, _ in rows]
    assert found["time_ns"].tolist() == [(17 * 10**8 + i) * 10**9 + v % 10**9 for i, (v, _, _) in enumerate(rows)]


@pytest.mark.parametrize(
    "broken",
    [
        SHOWN.replace(b"[Rank 0]", b"[Rank x]"),
        SHOWN.replace(b"[Rank 0]", b"[Rank 99999999]"),
        SHOWN.replace(b"opCount 2", b"opCount "),
        SHOWN.replace(b"opCount 2", b"opCount 2a"),
        SHOWN.replace(b"opCount 2", b"opCount 99999999999999999999"),
        SHOWN.replace(b"364857579", b"36485757"),
        SHOWN.replace(b"1755590106", b"99999999999"),
        SHOWN.replace(b"0x55919d27b4b0", b"0x55919d27b4bz"),
        SHOWN.replace(b"0x55919d27b4b0", b"0x0055919d27b4b0aaaaa"),
        SHOWN.replace(b"Fun ", b"Fan "),
        SHOWN.replace(b"[save_count", b"{save_count"),
        SHOWN.replace(b" stream", b"  stream"),
        HASHED.replace(b"-5956285979098587305", b"-"),
        HASHED.replace(b"groupHash", b"groupHush"),
        SHOWN[:60] + b"\n",
        b"x" * 5000 + b"\n",
        b"\0" * 100 + b"\n",
    ],
)
def test_a_line_that_is_none_is_counted_and_the_others_are_kept(broken: bytes) -> None:
    found = parse(SHOWN + broken + SHOWN)
    assert len(found.lines) == 2
    assert (found.total, found.bad, found.first_bad) == (3, 1, 1)


def test_a_file_that_is_cut_in_a_line_loses_that_line_alone() -> None:
    found = parse(SHOWN + SHOWN[:50])
    assert len(found.lines) == 1
    assert found.bad == 1


def test_streams_that_differ_in_one_digit_stay_apart() -> None:
    streams = (b"55919d27b4b0", b"55919d27b4b1", b"65919d27b4b0", b"b0", b"5555919d27b4b0ff", b"55919d27b4b0")
    found = parse(b"".join(SHOWN.replace(b"55919d27b4b0", stream) for stream in streams))
    assert found.lines["stream"].tolist() == [int(stream, 16) for stream in streams]


def test_nothing_and_empty_lines_are_no_fault() -> None:
    assert parse(b"").bad == 0
    assert parse(b"\n\n" + SHOWN).bad == 0


def test_a_function_that_is_not_known_is_told() -> None:
    found = parse(SHOWN.replace(b"AllReduce", b"AllShuffle"))
    assert found.unknown == ("AllShuffle",)
    assert found.lines["function"].tolist() == [0]


def test_what_the_vectorised_parser_takes_a_regular_expression_takes_too() -> None:
    """Random damage: both must agree on which lines are some, and on their numbers."""
    wanted = re.compile(
        rb"\[save_count (\d{1,9})\] \[(\d{1,10})\.(\d{9})\] \[Rank (\d{1,7})\] Fun ([^ ]+) Data (\d{1,19}) "
        rb"stream 0x([0-9a-fA-F]{1,16}) opCount (\d{1,18})(?: groupHash (-?)(\d{1,19}))?"
    )
    rng = np.random.default_rng(11)
    lines = []
    for _ in range(3000):
        text = bytearray((SHOWN, HASHED)[int(rng.integers(2))][:-1])
        for _ in range(int(rng.integers(3))):
            text[int(rng.integers(len(text)))] = int(rng.choice(list(b"0123456789 []x.-aF\t")))
        lines.append(bytes(text))
    found = parse(b"\n".join(lines))
    kept = [m for one in lines if (m := wanted.fullmatch(one)) and int(m[2]) < 1 << 33 and int(m[4]) < 1 << 20]
    assert [(int(m[1]), int(m[2]) * 10**9 + int(m[3]), int(m[4]), int(m[6]), int(m[8])) for m in kept] == found.lines[
        ["save", "time_ns", "rank", "count", "op_count"]
    ].tolist()
    assert 500 < len(kept) < 2900
