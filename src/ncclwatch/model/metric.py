"""A metric as Prometheus and OTLP know it: plain data, in neither's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Labels = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric with its samples, each the labels and a value; ``text`` says what it is.

    A ``counter`` only grows over the life of the process that tells it. Names carry their unit (``_bytes``, ``_seconds``,
    ``_ratio``), as Prometheus wants it.
    """

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    samples: tuple[tuple[Labels, float], ...]
