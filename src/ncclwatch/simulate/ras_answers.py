"""SIMULATED answers of NCCL's RAS: what its service would say of a simulated job at some moment, as JSON.

Form as ``rasDumpCommsToJSON`` writes it (NCCL v2.30.7, ``src/ras/client_support.cc``). Shares no code with what reads it. Every
process answers but those that are stopped or have ended; of those it says that they do not, after a minute that they are dead.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from ncclwatch.model.state import Transport
from ncclwatch.simulate.observe import Cast, Membership
from ncclwatch.simulate.timeline import Timeline

COUNTED = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
"""Fact: functions that ``collective_counts`` names, in their order (``ncclFunc_t``)."""
DEAD_AFTER_S = 60.0
"""Fact: RAS_PEER_DEAD_TIMEOUT (``src/ras/ras_internal.h``)."""
SUCCESS, REMOTE_ERROR, IN_PROGRESS = 0, 6, 7
"""Fact: ``ncclResult_t``."""


def ras_answer(timeline: Timeline, at_s: float) -> str:
    """The answer at a true time of the simulation (seconds)."""
    cast, world = Cast(timeline.scenario), timeline.scenario.layout.world
    counts = _counts(timeline, at_s)
    silent = {rank: since for rank in range(world) if (since := _silent_since(timeline, rank, at_s)) is not None}
    communicators: dict[int, dict[str, Any]] = {}
    for rank in range(world):
        for member in _created(timeline, cast, rank, at_s):
            own = communicators.setdefault(member.hash, _communicator(member))
            node, device = divmod(rank, timeline.scenario.layout.ranks_per_node)
            place = {"rank": member.rank, "host": f"10.0.0.{node}", "pid": 10_000 + rank, "cuda_dev": device, "nvml_dev": device}
            if rank in silent:
                status = {"unresponsive": True, "considered_dead": at_s - silent[rank] >= DEAD_AFTER_S}
                own["missing_ranks"].append({**place, "status": status})
                continue
            told = {name: counts[rank][member.role, name] for name in COUNTED}
            own["ranks"].append({**place, "status": _status(timeline, member, at_s), "collective_counts": told})
    for own in communicators.values():
        own["ranks_count"], own["missing_ranks_count"] = len(own["ranks"]), len(own["missing_ranks"])
    said = [own for own in communicators.values() if own["ranks"]]
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(cast.clock(0).wall_ns(at_s) / 1e9))
    return json.dumps(
        {
            "nccl_version": ".".join(map(str, cast.version)), "cuda_runtime_version": 12040, "cuda_driver_version": 12040,
            "timestamp": stamp, "communicators_count": len(said), "communicators": said,
            "ras": {"collection_time_sec": 0.01, "timeouts_count": len(silent)},
        },
        indent=2,
    )  # fmt: skip


def _counts(timeline: Timeline, at_s: float) -> dict[int, Counter[tuple[str, str]]]:
    """Calls of each rank by role and function."""
    counts: dict[int, Counter[tuple[str, str]]] = defaultdict(Counter)
    for block in timeline.blocks:
        for rank in block.ranks[np.isfinite(block.called) & (block.called <= at_s)].tolist():
            counts[rank][block.role, block.calling(rank).function] += 1
    return counts


def _silent_since(timeline: Timeline, rank: int, at_s: float) -> float | None:
    disturbance = timeline.disturbance
    if rank in disturbance.died and disturbance.died[rank] <= at_s:
        return disturbance.died[rank]
    return next((start for start, end in disturbance.stopped.get(rank, ()) if start <= at_s < end), None)


def _created(timeline: Timeline, cast: Cast, rank: int, at_s: float) -> list[Membership]:
    """Communicators that a rank has begun to make."""
    init_s = timeline.scenario.network.init_s
    if rank in timeline.never_initialised or at_s < 0.1 * init_s:
        return []
    creating = bool(timeline.never_initialised) or at_s < init_s
    return [one for one in cast.memberships(rank) if not creating or one.role == "world"]


def _communicator(member: Membership) -> dict[str, Any]:
    return {
        "hash": f"{member.hash:#x}", "secondary_hash": f"0x1:{member.group:#x}", "size": len(member.members), "ranks_count": 0,
        "missing_ranks_count": 0, "ranks": [], "missing_ranks": [],
    }  # fmt: skip


def _status(timeline: Timeline, member: Membership, at_s: float) -> dict[str, Any]:
    creating = bool(timeline.never_initialised) or at_s < timeline.scenario.network.init_s
    near = {member.members[peer] for _, peer, _, transport in member.transports if transport is Transport.NET}
    died = timeline.disturbance.died
    lost = any(rank in died and died[rank] + 0.01 <= at_s for rank in near)
    return {
        "init_state": IN_PROGRESS if creating else SUCCESS, "async_error": REMOTE_ERROR if lost else SUCCESS,
        "finalize_called": False, "destroy_flag": False, "abort_flag": False,
    }  # fmt: skip
