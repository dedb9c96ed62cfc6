"""Faults that change what a rank calls: its program of one iteration with the fault in it, and where in it a fault strikes."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.simulate.program import Action, Collective, Compute, PointToPoint
from ncclwatch.simulate.scenario import Fault, FaultKind

OTHER = {"AllReduce": "AllGather", "AllGather": "ReduceScatter", "ReduceScatter": "AllReduce"}
"""What a rank calls instead of the operation its peers call."""


def edit(actions: list[Action], fault: Fault) -> tuple[list[Action], int]:
    """The program of the faulty rank in the faulty iteration, and the index of the action at which it shows.

    Raises ``ValueError`` when the operation the fault names is not in the program.
    """
    found = [i for i, a in enumerate(actions) if isinstance(a, Collective) and fault.role in (a.role, "")]
    if fault.occurrence >= len(found):
        raise ValueError(f"{fault.kind}: the iteration has {len(found)} collectives of role {fault.role!r}")
    at = found[fault.occurrence]
    action = actions[at]
    assert isinstance(action, Collective)  # noqa: S101 - `found` holds nothing else
    changed = list(actions)
    if fault.kind is FaultKind.SKIP:
        del changed[at]
        return changed, next((i for i in range(at, len(changed)) if not isinstance(changed[i], Compute)), at)
    if fault.kind is FaultKind.SWAP:
        other = next(
            (i for i in range(at + 1, len(actions)) if isinstance(b := actions[i], Collective) and b.role != action.role), None
        )
        if other is None:
            raise ValueError("swap: no later collective of another role")
        changed[at], changed[other] = changed[other], changed[at]
    elif fault.kind is FaultKind.OTHER_OPERATION:
        changed[at] = replace(action, function=OTHER[action.function])
    elif fault.kind is FaultKind.OTHER_SIZE:
        changed[at] = replace(action, nbytes=max(1, round(action.nbytes * fault.strength)))
    else:
        size = max(1, round(action.element_bytes * fault.strength))
        changed[at] = replace(action, nbytes=action.nbytes // action.element_bytes * size, element_bytes=size)
    return changed, at


def position(actions: list[Action], fault: Fault) -> int:
    """Index of the operation at which a fault of the machine strikes; past the end when there is none."""
    roles = [(i, "pp" if isinstance(a, PointToPoint) else a.role) for i, a in enumerate(actions) if not isinstance(a, Compute)]
    found = [i for i, role in roles if fault.role in (role, "")]
    return found[fault.occurrence] if fault.occurrence < len(found) else len(actions) + 1_000_000
