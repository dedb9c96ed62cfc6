"""Of pages with lines of LL, recordings keep the flags and none of the job's data."""

from __future__ import annotations

from ncclwatch.target.lineflags import blank
from ncclwatch.target.memory import PAGE_SIZE

SECRET = bytes(range(1, 17)) * (PAGE_SIZE // 16)


def test_only_flags_stay() -> None:
    pages = {0x10000: SECRET, 0x11000: SECRET, 0x20000: SECRET}
    kept = blank(pages, {0x10000: (2 * PAGE_SIZE, (0x10004, 0x11FFC))})
    assert kept[0x10000] == bytes(4) + SECRET[4:8] + bytes(PAGE_SIZE - 8)
    assert kept[0x11000] == bytes(PAGE_SIZE - 4) + SECRET[-4:]
    assert kept[0x20000] == SECRET
    assert pages[0x10000] == SECRET, "what was read stays as it was"


def test_what_lies_beside_a_slot_on_its_page_stays() -> None:
    kept = blank({0x10000: SECRET}, {0x10100: (0x100, (0x10104,))})
    assert kept[0x10000] == SECRET[:0x100] + bytes(4) + SECRET[0x104:0x108] + bytes(0xF8) + SECRET[0x200:]


def test_pages_that_could_not_be_read_are_no_matter() -> None:
    assert blank({}, {0x10000: (PAGE_SIZE, (0x10004,))}) == {}
