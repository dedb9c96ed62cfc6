"""Which ranks can be compared: those that do equal work and are seen by equal means, and which are on one host or node."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.connections import is_hidden
from ncclwatch.engine.evidence.device import sees_everything
from ncclwatch.engine.job import Job, Member, identity_of
from ncclwatch.engine.slow.cadence import Cadences
from ncclwatch.engine.topology.model import Topology
from ncclwatch.model.state import Communicator


def equals(job: Job, topology: Topology | None, cadences: Cadences, *, by_means: bool = True) -> NDArray[np.int64]:
    """Sets of ranks that do equal work and (``by_means``) are seen by equal means; −1 for a rank without a known equal."""
    keys: list[object] = []
    for member in job.members:
        seen = _means(member) if by_means else ()
        stage = int(topology.stage[member.rank]) if _knows(topology, member.rank) and topology is not None else -1
        cadence = cadences.find(member.info.host, member.info.pid)
        program = cadence.program if cadence is not None else 0
        if stage >= 0:
            keys.append((seen, "stage", stage))
        elif program:
            keys.append((seen, "program", program))
        else:
            keys.append(None)
    numbers: dict[object, int] = {}
    result = np.array([-1 if key is None else numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    sizes = np.bincount(result[result >= 0], minlength=len(numbers) + 1)
    alone = np.array([n < 0 or sizes[n] < 2 for n in result])
    result[alone] = -1
    return result


def hosts(job: Job) -> NDArray[np.int64]:
    """A number for each host, by member."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(member.info.host, len(numbers)) for member in job.members], np.int64)


def nodes(job: Job) -> NDArray[np.int64]:
    """A number for each node as NCCL tells them apart, by member; hosts where it was not read."""
    numbers: dict[object, int] = {}
    keys = [
        (member.info.host, next((known[0] for c in member.last.communicators if (known := identity_of(c, c.rank))), None))
        for member in job.members
    ]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def hidden_together(job: Job) -> NDArray[np.int64]:
    """Sets of ranks of one node that are joined by what the host cannot see into (NVLink): a number each, −1 for none."""
    hidden = np.array([any(is_hidden(own) for own in member.last.communicators) for member in job.members], np.bool_)
    return np.where(hidden & (not sees_everything(job)), nodes(job), -1)


def _means(member: Member) -> tuple[object, ...]:
    """Which kinds of connections there are, not how many: at the ends of a ring some are not made that others have."""
    used = [c for c in member.last.communicators if _is_used(c)]
    return tuple(sorted({(c.nranks, str(way), str(kind)) for c in used for _, _, way, kind in c.transports}))


def _is_used(communicator: Communicator) -> bool:
    """Whether anything was ever called on it, as far as NCCL counts: of what is not, no look shows anything."""
    if communicator.op_count or communicator.sequence_numbers:
        return True
    moved = any(s.step for s in communicator.net_steps) or any(h.tail for h in communicator.host_connections)
    return moved or is_hidden(communicator)


def _knows(topology: Topology | None, rank: int | None) -> bool:
    return topology is not None and rank is not None and 0 <= rank < topology.world and int(topology.stage[rank]) >= 0
