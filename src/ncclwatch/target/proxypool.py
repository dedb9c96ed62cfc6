"""Operations that wait in a proxy's pool: put there by main threads, not yet taken by the proxy thread (src/proxy.cc)."""

from __future__ import annotations

from collections.abc import Mapping

from ncclwatch.model.state import PendingOperation
from ncclwatch.target.commstate import collective_name
from ncclwatch.target.decode import Decoder, Values
from ncclwatch.target.layout import Layout
from ncclwatch.target.proxyconn import Connections, name_of
from ncclwatch.target.wanted import PROTOCOLS

MAX_PENDING = 1024
"""Operations of one pool that are read in one sample."""

MAX_LOCAL_RANKS = 1024
"""Ranks of one host that are believed."""

ATTEMPTS = 3
"""How often chains that changed under the walk are walked before they count as torn."""

PROFILER = "Profiler"
"""Pattern of the operations that only tell a profiler plugin when kernels run (2.26 and later)."""

_STATE_PATHS = ("tpLocalnRanks", "proxyOps", "progressState.opsPool", "progressState.nextOps")
_OP_PATHS = (
    "connection",
    "nbytes",
    "opCount",
    "root",
    "next",
    "nsteps",
    "channelId",
    "coll",
    "pattern",
    "protocol",
    "peer",
    "rank",
)


class PoolReader:
    """Reads what waits in the pools of one process's proxies."""

    def __init__(self, decoder: Decoder, connections: Connections, local_ranks: Mapping[int, int]) -> None:
        self.decoder = decoder
        self._connections = connections
        self._local_ranks = local_ranks
        self.full: dict[int, bool] = {}
        """By address of a proxy's state, whether its launcher has no slot left in a pool: the next launch spins for one
        (``ncclLocalOpAppend``, src/proxy.cc).
        """

    def read(self, proxy_state: int) -> list[tuple[int, PendingOperation]]:
        """What main threads have put into the pool and the proxy has not taken, each with its connection.

        Operations move from chain to chain and then to the free list while they are read, and their links with them: when the
        heads of the chains changed under the walk, it is done again, and given up as torn in the end.
        """
        for attempt in range(ATTEMPTS):
            heads = self._heads(proxy_state, again=attempt > 0)
            found: dict[tuple[int, int], Values] = {}
            for pool, first in heads:
                self._walk(pool, first, found)
            if self._heads(proxy_state, again=True) == heads:
                break
        else:
            self.decoder.torn += 1
            return []
        records = ((values["connection"] or 0, self._record(proxy_state, values)) for values in found.values())
        return [(connection, record) for connection, record in records if record is not None]

    def _heads(self, proxy_state: int, *, again: bool) -> list[tuple[int, int]]:
        """(pool, index of its first operation) of the chains: posted (``pool.nextOps``), taken but not yet appended
        (``progressState.nextOps``), and of each local rank's pool what this process has not posted yet (``proxyOps[].nextOps``).
        """
        decoder, layout = self.decoder, self.decoder.layout
        state = decoder.structure(decoder.fields("ncclProxyState", _STATE_PATHS), proxy_state, again=again)
        if state is None:
            return []
        pool = state["progressState.opsPool"] or 0
        heads: list[tuple[int, int | None]] = []
        if pool and layout.has("ncclProxyOpsPool.nextOps"):
            posted = decoder.structure(decoder.fields("ncclProxyOpsPool", ("nextOps",)), pool, again=again)
            heads += [(pool, (posted or {}).get("nextOps")), (pool, state["progressState.nextOps"])]
        local, proxy_ops = state["tpLocalnRanks"] or 0, state["proxyOps"] or 0
        if proxy_ops and 0 < local <= MAX_LOCAL_RANKS and layout.has("ncclProxyOps.nextOps"):
            wanted = decoder.fields("ncclProxyOps", ("pool", "nextOps", "freeOp"))
            places = [proxy_ops + index * wanted.size for index in range(local)]
            used = [own for own in decoder.structures(wanted, places, again=again) if own and own["pool"]]
            heads += [(own["pool"] or 0, own["nextOps"]) for own in used]
            self.full[proxy_state] = any(own["freeOp"] == -1 and self._is_empty(proxy_state, own["pool"]) for own in used)
        return [(place, first) for place, first in heads if first is not None and first >= 0]

    def _is_empty(self, proxy_state: int, pool: int | None) -> bool:
        """Whether the proxy has given back no slot that this process may take next (``ncclProxyOpsPool.freeOps``)."""
        layout, local_rank = self.decoder.layout, self._local_ranks.get(proxy_state, -1)
        if not pool or local_rank < 0 or not layout.has("ncclProxyOpsPool.freeOps"):
            return False
        heads = layout.member("ncclProxyOpsPool.freeOps")
        found = self.decoder.words(pool + heads.at(local_rank), 1, 4, signed=True) if local_rank < heads.count else None
        return found is not None and tuple(found) == (-1,)

    def _walk(self, pool: int, first: int, found: dict[tuple[int, int], Values]) -> None:
        decoder = self.decoder
        ops = decoder.layout.member("ncclProxyOpsPool.ops")
        wanted = decoder.fields("ncclProxyOp", _OP_PATHS)
        index = first
        while 0 <= index < ops.count and (pool, index) not in found:
            if len(found) >= MAX_PENDING:
                decoder.truncated[f"pending operations: the first {MAX_PENDING}"] = None
                return
            values = decoder.structure(wanted, pool + ops.at(index))
            if values is None:
                return
            found[(pool, index)] = values
            index = values["next"] if values["next"] is not None else -1

    def _record(self, proxy_state: int, values: Values) -> PendingOperation | None:
        connection = self._connections.at(values["connection"] or 0)
        pattern = pattern_name(self.decoder.layout, values)
        if connection is None or pattern == PROFILER:
            return None
        owners = self._connections.owners(proxy_state, [values])
        return PendingOperation(
            comm_hash=owners[0].record.hash if len(owners) == 1 else 0,
            comm_address=owners[0].record.address if len(owners) == 1 else 0,
            direction=connection.direction,
            op_count=values["opCount"] or 0,
            channel=values["channelId"] or 0,
            peer=self._connections.peer(values, connection, owners),
            nsteps=values["nsteps"] or 0,
            collective=collective_of(self.decoder.layout, values, pattern),
            protocol=name_of(PROTOCOLS, values["protocol"]),
            nbytes=values["nbytes"],
            rank=self._connections.rank(values, connection, owners),
        )


def pattern_name(layout: Layout, values: Values) -> str:
    """``ncclPattern_t`` of an operation without its prefix."""
    return layout.enum_name("ncclPattern_t", values["pattern"] or 0).removeprefix("ncclPattern")


def collective_of(layout: Layout, values: Values, pattern: str) -> str:
    """The collective's name; before v2.20 ``ncclProxyArgs`` has no ``coll``, and only point-to-point patterns tell.

    Of a point-to-point operation 2.21 leaves ``coll`` at 0, which is a broadcast: the pattern goes first.
    """
    if pattern in ("Send", "Recv"):
        return pattern
    return "" if values["coll"] is None else collective_name(layout.enum_name("ncclFunc_t", values["coll"]))
