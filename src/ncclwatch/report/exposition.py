"""Metrics as Prometheus reads them (text format 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from ncclwatch.model.metric import Labels, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metric(
    name: str, kind: Literal["gauge", "counter"], text: str, samples: Iterable[tuple[Labels, float | None]]
) -> Iterator[Metric]:
    """One metric with its samples; a value that is not known is left out, and a metric without values too."""
    known = tuple((labels, value) for labels, value in samples if value is not None)
    if known:
        yield Metric(name, kind, text, known)


def text_of(metric: Metric) -> str:
    """One metric as lines."""
    lines = [f"# HELP {metric.name} {metric.text}", f"# TYPE {metric.name} {metric.kind}"]
    for labels, value in metric.samples:
        inner = ",".join(f'{key}="{_escape(str(item))}"' for key, item in labels.items())
        lines.append(f"{metric.name}{f'{{{inner}}}' if inner else ''} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
