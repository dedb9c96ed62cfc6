"""What is told as an event: a verdict that begins to stand or changes, and one that stands no longer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ncclwatch.model.verdict import Verdict

VERDICT, RECOVERY = "ncclwatch.verdict", "ncclwatch.recovery"
MAX_HOSTS = 64
"""Hosts of culprits that an event names beside its verdict, which names all."""

Attribute = str | float | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """One event. ``at_ns``: CLOCK_REALTIME. ``body``: JSON text, an object; ``attributes``: what receivers filter by."""

    name: str
    severity: Literal["INFO", "WARN", "ERROR"]
    at_ns: int
    job: str
    body: str
    attributes: Mapping[str, Attribute]


def verdict_event(verdict: Verdict, document: Mapping[str, Any], job: str, at_ns: int) -> Event:
    """A verdict that begins to stand; ``document`` is its JSON (``ncclwatch.verdict/1``), its texts cleaned."""
    severity: Literal["INFO", "WARN", "ERROR"] = "INFO"
    if verdict.verdict_class.accuses:
        severity = "WARN" if verdict.verdict_class.slow else "ERROR"
    return Event(VERDICT, severity, at_ns, job, _body(document, job, at_ns), _attributes(document))


def recovery_event(document: Mapping[str, Any], duration_s: float, job: str, at_ns: int) -> Event:
    """A verdict that stood for ``duration_s`` and stands no longer."""
    body = _body({**document, "duration_s": round(duration_s, 3)}, job, at_ns)
    return Event(RECOVERY, "INFO", at_ns, job, body, _attributes(document) | {"ncclwatch.duration_s": round(duration_s, 3)})


def _body(document: Mapping[str, Any], job: str, at_ns: int) -> str:
    return json.dumps({**document, "job": job, "at_ns": at_ns}, allow_nan=False, separators=(",", ":"))


def _attributes(document: Mapping[str, Any]) -> dict[str, Attribute]:
    hosts = dict.fromkeys(str(culprit["host"]) for culprit in document["culprits"])
    return {
        "ncclwatch.id": document["id"],
        "ncclwatch.class": document["class"],
        "ncclwatch.summary": document["summary"],
        "ncclwatch.confidence": float(document["confidence"]),
        "ncclwatch.culprit.hosts": tuple(hosts)[:MAX_HOSTS],
    }
