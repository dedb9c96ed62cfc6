"""Text for people: nothing a target says reaches a terminal as a command, and units read well."""

from __future__ import annotations

import unicodedata

import pytest

from ncclwatch import text


@pytest.mark.parametrize(
    ("dirty", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]never ends", ""),
        ("\x9b31mred", "red"),
        ("a\rb\nc\td", "a?b?c?d"),
        ("rank\u202e0", "rank?0"),
        ("zero\u200bwidth", "zero?width"),
        ("line\u2028separator", "line?separator"),
        ("lone\udc80surrogate", "lone?surrogate"),
        ("\x1b", ""),
        ("\x1b\x1b[2J[2J", "[2J"),
        ("nul\0", "nul?"),
        ("Größe 模型", "Größe 模型"),
    ],
)
def test_clean_leaves_nothing_that_a_terminal_obeys(dirty: str, shown: str) -> None:
    assert text.clean(dirty) == shown


def test_clean_of_every_control_character_is_printable() -> None:
    every = "".join(map(chr, [*range(0xA0), 0xAD, *range(0x200B, 0x2010), *range(0x2028, 0x202F), 0xFEFF, 0xE0001]))
    assert not [ch for ch in text.clean(every, 10000) if unicodedata.category(ch).startswith("C")]


def test_clean_bounds_what_it_returns_and_says_that_it_cut() -> None:
    assert text.clean("x" * 10_000_000, 50) == "x" * 49 + "…"
    assert len(text.clean("\x1b[0m" * 1_000_000 + "x", 50)) <= 50


def test_the_first_of_many_names_and_how_many_more() -> None:
    assert text.first_of(iter("abc"), 3) == "a, b, c" and text.first_of("abcd", 3) == "a, b, c and 1 more"


def test_ranges() -> None:
    assert text.ranges([]) == ""
    assert text.ranges([3]) == "3"
    assert text.ranges([3, 0, 1, 1]) == "0-1, 3"
    assert text.ranges(range(128)) == "0-127"
    assert text.ranks([2]) == "rank 2"
    assert text.ranks([0, 1, 3]) == "ranks 0-1, 3"


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (64 << 20, "64 MiB"), (1.25 * (1 << 30), "1.2 GiB")],
)
def test_sizes(nbytes: float, shown: str) -> None:
    assert text.size(nbytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-1, "0.0s"),
        (0.04, "0.0s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.6, "1m00s"),
        (245, "4m05s"),
        (7380, "2h03m"),
        (266400, "3d02h"),
    ],
)
def test_durations(seconds: float, shown: str) -> None:
    assert text.duration(seconds) == shown


def test_columns_align_by_terminal_cells_and_leave_out_what_is_empty() -> None:
    lines = text.columns(("NAME", "NOTHING", "N"), [("模型", "", "7"), ("ab", "", "1000")], right=(2,))
    assert lines == ["NAME     N", "模型     7", "ab    1000"]


def test_fit_cuts_by_terminal_cells() -> None:
    assert text.fit("模型模型", 5) == "模型…"
    assert text.width(text.fit("模型模型", 6)) <= 6
    assert text.fit("short", 5) == "short"


def test_wrapped_lines_hang_and_lose_nothing() -> None:
    line = "    - rank 3 (node, pid 1) waits for rank 2, which has no operation open for it"
    wrapped = text.wrap(line, 40)
    assert all(text.width(part) <= 40 for part in wrapped)
    assert wrapped[0].startswith("    - rank 3")
    assert all(part.startswith("      ") for part in wrapped[1:])
    assert " ".join(" ".join(wrapped).split()) == " ".join(line.split())
    assert text.wrap("short", 40) == ["short"]
