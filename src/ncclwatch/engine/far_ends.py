"""Which rank of the job is at the other end of a connection."""

from __future__ import annotations

from collections.abc import Iterable

from ncclwatch.model.network import FlowRecord
from ncclwatch.model.verdict import Culprit


class FarEnds:
    """The far ends of connections, by what the hosts at both ends say of them.

    A socket's other end is the socket with the two addresses changed over. Without one (RDMA, or a host that is not watched) it
    is the rank of the communicator, where hashes of communicators that are equal (splits before NCCL 2.24) leave no doubt;
    ``culprits`` are known by both ranks.
    """

    def __init__(self, flows: Iterable[FlowRecord], culprits: Iterable[Culprit]) -> None:
        self._by_address: dict[tuple[str, str], set[int]] = {}
        self._by_rank: dict[tuple[int, int], set[int]] = {
            (int(culprit.communicator.hash, 16), culprit.comm_rank): {culprit.rank}
            for culprit in culprits
            if culprit.communicator is not None and culprit.comm_rank is not None and culprit.rank is not None
        }
        for flow in flows:
            if flow.global_rank is None:
                continue
            if flow.socket is not None:
                self._by_address.setdefault((flow.socket.local, flow.socket.remote), set()).add(flow.global_rank)
            if flow.comm_hash is not None and flow.rank is not None:
                self._by_rank.setdefault((flow.comm_hash, flow.rank), set()).add(flow.global_rank)

    def rank_of(self, flow: FlowRecord) -> int | None:
        """The job's rank at the other end; ``None`` where it is not known, or several could be."""
        found: set[int] = set()
        if flow.socket is not None:
            found = self._by_address.get((flow.socket.remote, flow.socket.local), set())
        if not found and flow.comm_hash is not None and flow.peer is not None:
            found = self._by_rank.get((flow.comm_hash, flow.peer), set())
        return next(iter(found)) if len(found) == 1 else None
