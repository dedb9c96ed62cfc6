"""``--wire``: how work requests are counted, and what that may cost."""

from __future__ import annotations

import pytest

from ncclwatch.cli.options import WIRE
from ncclwatch.cli.wire_option import wire_mode
from ncclwatch.errors import UsageError
from ncclwatch.wire.governor import DEFAULT_BUDGET, Mode


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WIRE, (Mode.BURSTS, DEFAULT_BUDGET)),
        ("1%", (Mode.BURSTS, 0.01)),
        ("100", (Mode.BURSTS, 1.0)),
        ("exact", (Mode.EXACT, DEFAULT_BUDGET)),
        ("off", (Mode.STATE, DEFAULT_BUDGET)),
        ("0", (Mode.STATE, DEFAULT_BUDGET)),
    ],
)
def test_a_share_or_a_word(text: str, expected: tuple[Mode, float]) -> None:
    mode, share = wire_mode(text)
    assert mode is expected[0]
    assert share == pytest.approx(expected[1])


@pytest.mark.parametrize("text", ["", "some", "-1", "101", "nan", "inf"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no share"):
        wire_mode(text)
