"""A few kills at random of everything a fleet is made of; more with ``NCCLWATCH_KILLS``, or by ``python -m fleet.kills``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleet.kills import trial

KILLS = int(os.environ.get("NCCLWATCH_KILLS", "4"))


@pytest.mark.timeout(300 + 120 * KILLS)
def test_every_verdict_is_told_once_whatever_dies(tmp_path: Path) -> None:
    outcome = trial(KILLS, int(os.environ.get("NCCLWATCH_SEED", "7")), tmp_path)
    print(outcome.text())
    assert not outcome.faults, "\n".join([*outcome.trail, *outcome.faults])
    assert outcome.findings
