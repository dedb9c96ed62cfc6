"""What was learned from recordings (``make calibrate``): weights of the slowness estimate, and thresholds for a chosen
false-alarm rate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

FILE = "calibration.json"


@dataclass(frozen=True, slots=True)
class Weights:
    """One conditional logit: the weight of each term, one intercept for each kind of candidate, and that of "nobody"."""

    terms: Mapping[str, float]
    kinds: Mapping[str, float]
    nobody: float
    jobs: int
    """Recorded jobs it was fitted to."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """``since`` weighs the candidates of a job that became slow, ``start`` those of one without a healthy past. ``name_from`` is
    the posterior probability from which on a candidate of each is named.
    """

    since: Weights
    start: Weights
    name_from: Mapping[str, float]
    change_log_bayes_factor: float
    """Natural logarithm of the odds from which on iteration times have changed."""
    note: Mapping[str, Any]
    """Where the numbers come from: seeds, numbers of jobs, false alarms and their bounds."""


def load(text: str | None = None) -> Calibration:
    """The table of this release, or one given as JSON. Raises ``ValueError`` or ``KeyError`` for a table that is none."""
    data = json.loads(text if text is not None else resources.files(__package__).joinpath(FILE).read_text("utf-8"))
    try:
        since, start = (Weights(**data[name]) for name in ("since", "start"))
    except TypeError as error:
        raise ValueError(f"no table of weights: {error}") from error
    return Calibration(since, start, data["name_from"], float(data["change_log_bayes_factor"]), data["note"])


TABLE = load()
