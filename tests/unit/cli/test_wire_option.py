"""``--wire``: how work requests are counted, and what that may cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclwatch.cli.options import WIRE
from ncclwatch.cli.wire_option import PROBE_PATHS, path_probes, wire_mode
from ncclwatch.errors import NcclwatchError, UsageError
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


def test_paths_are_probed_unless_that_is_switched_off_and_answered_with_a_secret_alone(tmp_path: Path) -> None:
    assert path_probes("off") is None
    by_default = path_probes(PROBE_PATHS)
    assert by_default is not None and not by_default.token
    secret = tmp_path / "token"
    secret.write_text("sixteen bytes it is\n")
    secret.chmod(0o600)
    shared = path_probes(str(secret))
    assert shared is not None and shared.token
    with pytest.raises(NcclwatchError):
        path_probes(str(tmp_path / "no such file"))
