"""What a training framework was told about its layout: Megatron-LM's command line, or a JSON file. It confirms and names, and
never overrules what the calls show.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ncclwatch.errors import UsageError
from ncclwatch.model.topology import Group, Layout, Role, Topology

NAMES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tensor-model-parallel-size", "tensor-parallel-size", "tp-size", "tp"),
    "pp": ("pipeline-model-parallel-size", "pipeline-parallel-size", "pp-size", "pp"),
    "dp": ("data-parallel-size", "dp-size", "dp"),
    "cp": ("context-parallel-size", "cp-size", "cp"),
    "ep": ("expert-model-parallel-size", "expert-parallel-size", "ep-size", "ep"),
}
"""Options that state a size: of Megatron-LM (``megatron/training/arguments.py``) first, then other spellings in use."""

LARGEST = 1 << 20
"""Ranks of one dimension: ten times the largest job designed for."""
LARGEST_FILE = 1 << 20
"""Bytes of a file, which holds five numbers."""


@dataclass(frozen=True, slots=True)
class Stated:
    """Sizes that were stated, ``None`` where nothing was said, and where they come from."""

    layout: Layout
    source: str

    @property
    def empty(self) -> bool:
        """Whether nothing was stated."""
        return self.layout == Layout()


def from_command(command: Sequence[str]) -> Stated:
    """Sizes from a command line: ``--option 2`` or ``--option=2``, underscores as good as hyphens."""
    said: dict[str, str] = {}
    for at, word in enumerate(command):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        said[name.replace("_", "-").lower()] = value if equals else (command[at + 1] if at + 1 < len(command) else "")
    return Stated(_sizes(said), "command line")


def from_file(path: Path) -> Stated:
    """Sizes from a JSON object, by the same names (with hyphens or underscores); raises ``UsageError``."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise UsageError(f"{path.name} is too large for a configuration", "give a JSON object with sizes such as tp, pp, dp")
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read configuration {path.name}", str(error)) from error
    if not isinstance(data, dict):
        raise UsageError(f"{path.name} is no JSON object", 'for example {"tp": 2, "pp": 4}')
    said = {str(name).replace("_", "-").lower(): value for name, value in data.items()}
    stated = Stated(_sizes(said), path.name)
    if stated.empty:
        raise UsageError(f"{path.name} states no size", 'for example {"tp": 2, "pp": 4}, or the options of Megatron-LM')
    return stated


def _sizes(said: Mapping[str, Any]) -> Layout:
    found: dict[str, int] = {}
    for dimension, names in NAMES.items():
        for name in names:
            text = str(said.get(name, "")).strip()
            if text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= LARGEST:
                found[dimension] = int(text)
                break
    return Layout(**found)


def compare(stated: Stated, topology: Topology) -> list[str]:
    """What agrees and what does not, in words."""
    agreeing, open_, lines = [], [], []
    for dimension in NAMES:
        wanted, seen = getattr(stated.layout, dimension), getattr(topology.layout, dimension)
        if wanted is None:
            continue
        text = f"{dimension.upper()} {wanted}"
        if seen is None:
            open_.append(text)
        elif seen == wanted:
            agreeing.append(text)
        else:
            lines.append(f"{stated.source} says {text}, the calls show {dimension.upper()} {seen}")
    if agreeing:
        lines.append(f"{stated.source} agrees: {', '.join(agreeing)}")
    if open_:
        lines.append(f"{stated.source} says {', '.join(open_)}, which the calls seen do not show")
    return lines


def name_unsure(stated: Stated, topology: Topology) -> Topology:
    """Name groups the calls alone leave unsure, where the configuration leaves one reading: one open dimension of that size."""
    roles = {"tp": Role.TENSOR, "dp": Role.DATA, "cp": Role.CONTEXT, "ep": Role.EXPERT}
    open_ = {
        role: size
        for dimension, role in roles.items()
        if (size := getattr(stated.layout, dimension)) not in (None, 1) and role not in topology.by_role
    }
    if len(open_) != 1:
        return topology
    ((role, size),) = open_.items()
    unsure = [group for group in topology.by_role.get(Role.UNSURE, ()) if group.evidence != ("no calls were seen",)]
    ranks = [rank for group in unsure for rank in group.ranks]
    if not unsure or any(len(group.ranks) != size for group in unsure) or len(set(ranks)) != len(ranks):
        return topology

    def named(group: Group) -> Group:
        if group not in unsure:
            return group
        return replace(group, role=role, confidence=0.7, evidence=(f"named by the {stated.source}", *group.evidence))

    return replace(topology, groups=tuple(named(group) for group in topology.groups))
