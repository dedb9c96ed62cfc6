"""Files of probes: what was written is read, what is something else is refused in one line; how sure several looks make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ncclwatch.errors import UsageError
from ncclwatch.paths.probed import MAX_BYTES, SCHEMA, ProbeFile, alike, joined, read, read_bytes, remembered, wrong_rate
from unit.paths.test_measured import LIVE, OWN, probe


def test_what_is_written_is_read() -> None:
    made = (probe(*OWN, *LIVE, wrong=0.1, notes=("x",)),)
    assert read(msgspec.json.encode(ProbeFile(SCHEMA, made)), "f") == made


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"[]", b"{}", b'{"schema":"other","probes":[]}', b"[" * 100_000]
    + [
        msgspec.json.encode(ProbeFile(SCHEMA, (probe(*OWN),))).replace(old, new)
        for old, new in ((b'"port":26000', b'"port":70000'), (b'"wrong":0.0', b'"wrong":2'), (b'"tcp"', b'"icmp"'))
    ],
)
def test_anything_else_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(UsageError) as caught:
        read(data, "name")
    assert "\n" not in str(caught.value) and "name" in str(caught.value)


def test_a_file_that_is_too_large_or_missing(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(b" " * (MAX_BYTES + 1))
    for path in (large, tmp_path / "none", tmp_path):
        with pytest.raises(UsageError):
            read_bytes(path)


def test_how_sure_looks_make() -> None:
    one, other = ("a", "b"), ("a", "c")
    assert wrong_rate([[one]]) == 0.5 and wrong_rate([[one] * 8, [one] * 8]) == 0.1
    assert wrong_rate([[one] * 8, [one] * 4 + [other] * 4]) == 0.5
    assert wrong_rate([[(None, None)], [one]]) == 0.5


def test_silence_is_no_difference_and_is_filled() -> None:
    assert alike(("a", None), ("a", "b")) and not alike(("a", "c"), ("a", "b")) and not alike(("a",), ("a", "b"))
    assert joined(("a", "x"), (None, "x")) == ("a", "x") and joined(("a", "y"), (None, "x")) == (None, "x")


def test_a_router_that_answered_late_is_not_forgotten() -> None:
    """Else each later path would be alike, and a spine that dies would change nothing."""
    first, late = OWN[0], replace(OWN[0], hops=(OWN[0].hops[0], None, OWN[0].hops[2]))
    assert remembered(probe(first), probe(late)).paths == (first,)
    dead = replace(late, arrived=False)
    assert remembered(probe(first), probe(dead)).paths == (dead,)
    assert remembered(probe(first), probe(OWN[1])).paths == (OWN[1],)
