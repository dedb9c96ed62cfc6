"""What ``--wire`` and ``--probe-paths`` say, for commands and for the agent, which loads no command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ncclwatch.errors import UsageError
from ncclwatch.text import clean

if TYPE_CHECKING:
    from ncclwatch.collect.paths import PathProbes
    from ncclwatch.wire.governor import Mode


def wire_mode(text: str) -> tuple[Mode, float]:
    """How work requests are counted, and the share of any thread's time that it may cost."""
    from ncclwatch.wire.governor import DEFAULT_BUDGET, Mode

    named = {"exact": Mode.EXACT, "off": Mode.STATE}.get(text.lower())
    if named is not None:
        return named, DEFAULT_BUDGET
    try:
        budget = float(text.removesuffix("%")) / 100
    except ValueError:
        budget = -1.0
    if not 0 <= budget <= 1:
        raise UsageError(f"'{clean(text, 40)}' is no share of a thread's time", "give --wire a number of percent, exact, or off")
    return (Mode.BURSTS, budget) if budget > 0 else (Mode.STATE, DEFAULT_BUDGET)


PROBE_PATHS = "tcp"
"""What ``--probe-paths`` is by default: connections are asked for, nobody listens, and nothing is sent over them."""


def path_probes(text: str) -> PathProbes | None:
    """Who probes paths, where that is not switched off."""
    if text.lower() == "off":
        return None
    from ncclwatch.collect.paths import PathProbes

    if text.lower() == PROBE_PATHS:
        return PathProbes()
    from ncclwatch.pathprobe.listener import check_token
    from ncclwatch.pathprobe.token import read_token

    token = read_token(Path(text))
    check_token("0.0.0.0", token)  # noqa: S104 - callers must know the token
    return PathProbes(token)
