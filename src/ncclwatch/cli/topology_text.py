"""An inferred topology for people and for scripts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ncclwatch.model.topology import Group, Learned, Phase, Role, Topology
from ncclwatch.text import Style, columns, compressed

SCHEMA_NAME = "ncclwatch.topology/1"
GROUPS_SHOWN = 6


def lines(learned: Learned, observed: int, remarks: Sequence[str], style: Style) -> list[str]:
    """A heading, one line for each role and size, the iteration, and what is not known and why."""
    topology = learned.topology
    heading = f"job of {topology.world} ranks, {observed} observed: {style.bold(topology.layout.text())}"
    if topology.confidence:
        heading += f", confidence {topology.confidence:.2f}"
    result = [heading]
    if topology.groups:
        result += ["", *_table(topology)]
    result += _iteration(learned)
    result += [f"  {remark}" for remark in remarks]
    result += [style.warn(f"  unsure: {reason}") for reason in topology.unsure[:8]]
    return result


def _table(topology: Topology) -> list[str]:
    kinds: dict[tuple[Role, int], list[Group]] = defaultdict(list)
    for group in topology.groups:
        kinds[group.role, len(group.ranks)].append(group)
    rows = []
    for (role, nranks), groups in kinds.items():
        shown = " ".join(f"[{compressed(group.ranks)}]" for group in groups[:GROUPS_SHOWN])
        more = f" … {len(groups) - GROUPS_SHOWN} more" if len(groups) > GROUPS_SHOWN else ""
        confidence = min(group.confidence for group in groups)
        why = next((group.evidence[0] for group in groups if group.evidence), "")
        rows.append((str(role), str(len(groups)), str(nranks), f"{confidence:.2f}" if confidence else "-", why, shown + more))
    return columns(("ROLE", "GROUPS", "SIZE", "SURE", "BECAUSE", "RANKS"), rows, right=(1, 2, 3))


def _iteration(learned: Learned) -> list[str]:
    if not learned.patterns:
        return ["", "iteration: no repeating pattern was seen"]
    result = ["", f"iteration{'' if learned.confirmed else ' (not yet confirmed by more of them)'}:"]
    alike: dict[tuple[int, int, int, str], list[int]] = defaultdict(list)
    for number, pattern in sorted(learned.patterns.items()):
        told = {step.phase for step in pattern.steps}
        how = (
            "forward and backward told apart"
            if {Phase.FORWARD, Phase.BACKWARD} <= told
            else "forward and backward not told apart"
        )
        alike[len(pattern), pattern.micro_batches, pattern.chunks, how].append(number)
    for (operations, micro_batches, chunks, how), stages in alike.items():
        text = f"  stage{'s' if len(stages) > 1 else ''} {compressed(stages)}: {operations} operations"
        text += f", {micro_batches} micro-batches" if micro_batches else ""
        text += f" through {chunks} model chunks" if chunks > 1 else ""
        result.append(f"{text}; {how}")
    return result


def to_json(learned: Learned, observed: int, remarks: Sequence[str]) -> dict[str, Any]:
    """The same as plain data, every group with its ranks."""
    topology = learned.topology
    layout = topology.layout
    return {
        "world": topology.world,
        "observed": observed,
        "layout": {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep, "cp": layout.cp},
        "confidence": round(topology.confidence, 3),
        "groups": [
            {
                "role": str(group.role),
                "hash": f"{group.hash:016x}" if group.hash else None,
                "ranks": list(group.ranks),
                "confidence": round(group.confidence, 3),
                "evidence": list(group.evidence),
                "inferred": group.inferred,
            }
            for group in topology.groups
        ],
        "stages": topology.stage.tolist(),
        "iteration": {
            "confirmed": learned.confirmed,
            "patterns": [
                {
                    "stage": pattern.stage,
                    "operations": len(pattern),
                    "micro_batches": pattern.micro_batches or None,
                    "chunks": pattern.chunks,
                    "seen": pattern.seen,
                    "confidence": pattern.confidence,
                }
                for pattern in learned.patterns.values()
            ],
        },
        "remarks": list(remarks),
        "unsure": list(topology.unsure),
    }
