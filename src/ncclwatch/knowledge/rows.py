"""The tables of knowledge, read and checked: one row is a pattern of typed things, the likely cause, and what to do.

Files are ``*.toml`` beside this module (docs/knowledge.md). A pattern is matched on typed things of a verdict, not on its words.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ncclwatch.errors import UsageError

Release = tuple[int, int, int]

FILES = ("doing.toml", "gpu.toml", "causes.toml", "defects.toml")
LISTS = (
    "class",
    "cause",
    "finding",
    "slow",
    "rule",
    "plane",
    "doing",
    "gpu",
    "operation",
    "transport",
    "arch",
    "setting",
    "inside",
    "differs",
    "failure",
)
"""Keys of a pattern that list values, of which one must fit."""
_RELEASE = re.compile(r"(\d{1,2})\.(\d{1,3})\.(\d{1,3})")
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_REQUIRED = {"id": str, "seen": str, "cause": str, "confidence": float, "do": list, "sources": list, "when": dict}
_OPTIONAL = {"check": str, "fixed_in": str}


class TableError(UsageError):
    """A row of a table is not of the form that docs/knowledge.md describes."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """When a row fits. ``lists``: of each key one of its values must be there; all keys must fit.

    ``since`` and ``before`` bound the release of NCCL (from the first on, up to but not including the second); ranks are those of
    the communicator.
    """

    lists: Mapping[str, frozenset[str]]
    since: Release | None = None
    before: Release | None = None
    min_ranks: int = 0
    max_ranks: int | None = None

    @property
    def by_release(self) -> bool:
        """Whether it depends on the release of NCCL."""
        return self.since is not None or self.before is not None

    @property
    def narrowness(self) -> int:
        """How many things must fit: of rows that are as sure, the narrower says more."""
        return len(self.lists) + self.by_release + (self.min_ranks > 0) + (self.max_ranks is not None)


@dataclass(frozen=True, slots=True)
class Row:
    """One row. ``confidence``, between 0 and 1: how likely this is the cause where the pattern fits; judged from the sources, not
    measured.

    ``do`` may hold ``{pid}`` and ``{host}`` of the first culprit. ``defect``: whether it is a known defect of NCCL; ``check``
    then says how to tell and ``fixed_in`` names the release, empty where none has the fix.
    """

    id: str
    seen: str
    cause: str
    confidence: float
    do: tuple[str, ...]
    sources: tuple[str, ...]
    when: Pattern
    defect: bool = False
    check: str = ""
    fixed_in: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain data, the pattern as in the table."""
        when: dict[str, Any] = {key: sorted(values) for key, values in self.when.lists.items()}
        bounds = {"from": self.when.since, "before": self.when.before}
        if self.when.by_release:
            when["release"] = {key: release_text(value) for key, value in bounds.items() if value is not None}
        if self.when.min_ranks:
            when["min_ranks"] = self.when.min_ranks
        if self.when.max_ranks is not None:
            when["max_ranks"] = self.when.max_ranks
        found: dict[str, Any] = {
            "id": self.id, "kind": "defect" if self.defect else "cause", "seen": self.seen, "cause": self.cause,
            "confidence": self.confidence, "do": list(self.do), "sources": list(self.sources), "when": when,
        }  # fmt: skip
        return {**found, "check": self.check, "fixed_in": self.fixed_in} if self.defect else found


def parse_release(text: str) -> Release:
    """``2.27.5`` as numbers; raises :class:`TableError`."""
    found = _RELEASE.fullmatch(text)
    if found is None:
        raise TableError(f"'{text}' is no release of NCCL", "write it as 2.27.5")
    return int(found[1]), int(found[2]), int(found[3])


def release_text(release: Release) -> str:
    """``2.27.5``."""
    return ".".join(map(str, release))


def placed(text: str, pid: str = "PID", host: str = "its host") -> str:
    """A step or a check of a row, with the process and the host it is about; without, in words that hold anywhere."""
    return text.replace("{pid}", pid).replace("{host}", host)


@cache
def rows() -> tuple[Row, ...]:
    """Every row of every table, in their order."""
    folder = Path(__file__).parent
    found: list[Row] = []
    for name in FILES:
        found += parse(folder.joinpath(name).read_text("utf-8"), name)
    return tuple(found)


def parse(text: str, name: str) -> list[Row]:
    """The rows of one table; raises :class:`TableError` that names the row and what is wrong with it."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"{name} is no TOML: {error}") from None
    if set(data) != {"row"} or not isinstance(data["row"], list):
        raise TableError(f"{name} must hold [[row]] tables and nothing else", "see docs/knowledge.md")
    return [_row(entry, f"{name}, row {number}", defect=name == "defects.toml") for number, entry in enumerate(data["row"], 1)]


def _row(entry: Mapping[str, Any], where: str, *, defect: bool) -> Row:
    where = f"{where} ({entry['id']})" if isinstance(entry.get("id"), str) else where
    required = _REQUIRED | (_OPTIONAL if defect else {})
    for key, kind in required.items():
        if not isinstance(entry.get(key), kind):
            raise TableError(f"{where}: '{key}' is missing or no {kind.__name__}", "see docs/knowledge.md")
    if unknown := set(entry) - set(required):
        raise TableError(f"{where}: nobody knows the key '{min(unknown)}'", "see docs/knowledge.md")
    if _ID.fullmatch(entry["id"]) is None or not 0 < entry["confidence"] < 1:
        raise TableError(f"{where}: an id is lower case with hyphens, a confidence between 0 and 1")
    do, sources = _words(entry["do"], f"{where}: do"), _words(entry["sources"], f"{where}: sources")
    return Row(
        entry["id"], entry["seen"], entry["cause"], entry["confidence"], do, sources, _pattern(entry["when"], where), defect,
        entry.get("check", ""), entry.get("fixed_in", ""),
    )  # fmt: skip


def _words(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
        raise TableError(f"{where} must be a list of texts, and not empty")
    return tuple(value)


def _pattern(when: Mapping[str, Any], where: str) -> Pattern:
    if not when or (unknown := set(when) - {*LISTS, "release", "min_ranks", "max_ranks"}):
        raise TableError(f"{where}: 'when' is empty, or has the unknown key '{min(unknown) if when else ''}'")
    release = when.get("release", {})
    if not isinstance(release, dict) or set(release) - {"from", "before"} or ("release" in when and not release):
        raise TableError(f"{where}: 'release' has 'from' or 'before', or both")
    since, before = (parse_release(release[key]) if key in release else None for key in ("from", "before"))
    if since is not None and before is not None and since >= before:
        raise TableError(f"{where}: no release lies from {release_text(since)} to before {release_text(before)}")
    least, most = when.get("min_ranks", 0), when.get("max_ranks")
    if not isinstance(least, int) or not isinstance(most, int | None):
        raise TableError(f"{where}: min_ranks and max_ranks are whole numbers")
    lists = {key: frozenset(_words(when[key], f"{where}: {key}")) for key in LISTS if key in when}
    return Pattern(lists, since, before, least, most)
