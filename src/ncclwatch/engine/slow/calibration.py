"""What was learned from recordings (``make calibrate``): weights of the slowness estimate, and when somebody is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "calibration.json"


@dataclass(frozen=True, slots=True)
class Weights:
    """A conditional logit: weights of terms, intercepts of kinds and of "nobody", and of how many jobs."""

    terms: Mapping[str, float]
    kinds: Mapping[str, float]
    nobody: float
    jobs: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """``since`` weighs the candidates of a job that became slow, ``start`` those of one without a healthy past. ``name_from`` is
    the posterior probability from which on a candidate of each is named (``beside``: somebody beside another or a network);
    ``change_log_bayes_factor`` the natural logarithm of the odds from which iteration times have changed; ``note``: their origin.
    """

    since: Weights
    start: Weights
    name_from: Mapping[str, float]
    change_log_bayes_factor: float
    note: Mapping[str, Any]


def load(text: str | None = None) -> Calibration:
    """The table of this release, or one given as JSON. Raises ``ValueError`` or ``KeyError`` for a table that is none."""
    data = json.loads(text if text is not None else Path(__file__).with_name(FILE).read_text("utf-8"))
    try:
        since, start = Weights(**data["since"]), Weights(**data["start"])
        return Calibration(since, start, data["name_from"], float(data["change_log_bayes_factor"]), data["note"])
    except TypeError as error:
        raise ValueError(f"no table of weights: {error}") from error


TABLE = load()
