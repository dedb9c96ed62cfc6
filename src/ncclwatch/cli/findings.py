"""What ``doctor`` finds: one line each, with what to do about a gap."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    INFO = "info"
    GAP = "gap"
    """Something works less well, or one plane is missing; the rest goes on."""
    MISSING = "missing"
    """Nothing, or not the live view, works without it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked. ``data`` is for scripts; ``hint`` says what to do and is empty when all is well."""

    name: str
    level: Level
    detail: str
    hint: str = ""
    data: dict[str, Any] = field(default_factory=dict)
