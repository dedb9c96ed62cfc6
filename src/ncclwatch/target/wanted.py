"""What is looked up in a build of NCCL: the structures, enumerations and symbols that the readers know how to use.

One list for every release: an entry that a build does not have is simply missing from its layout.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class WantedType:
    """One structure or enumeration: the ``key`` it gets in a layout, the names it has had, its source file if it needs one.

    ``names`` are tried in order, as tag and as typedef. ``source_file`` tells apart types of one name that differ between
    compile units (``sendResources`` of ``net.cc`` and ``coll_net.cc``).
    """

    key: str
    names: tuple[str, ...] = ()
    source_file: str = ""

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names to look for."""
        return self.names or (self.key,)


def _plain(*keys: str) -> tuple[WantedType, ...]:
    return tuple(WantedType(key) for key in keys)


STRUCTS: tuple[WantedType, ...] = (
    # The communicator and what hangs off it.
    *_plain(
        "ncclComm",
        "ncclSharedResources",
        "ncclChannel",
        "ncclRing",
        "ncclTree",
        "ncclDirect",
        "ncclNvls",
        "ncclChannelPeer",
        "ncclConnector",
        "ncclConnInfo",
        "ncclConnFifo",
        "ncclProxyConnector",
        "ncclPeerInfo",
        "ncclNodeRanks",
        "ncclConfig_t",
        "ncclSendMem",
        "ncclRecvMem",
        "ncclTransport",
        "ncclTransportComm",
        "ncclCollNetSharedRes",
    ),
    # Work that waits on the host: ncclTasks until 2.21, ncclKernelPlanner from 2.22.
    *_plain("ncclTasks", "ncclKernelPlanner", "ncclKernelPlan", "ncclTaskColl", "ncclTaskP2p", "ncclDevRedOpFull"),
    # The proxy thread.
    *_plain(
        "ncclProxyState",
        "ncclProxyProgressState",
        "ncclProxyArgs",
        "ncclProxySubArgs",
        "ncclProxyOp",
        "ncclProxyOpsPool",
        "ncclProxyOps",
        "ncclProxyPeer",
        "ncclProxySharedP2p",
        "ncclProxyConnection",
        "ncclProxyPool",
        "ncclSharedNetComms",
    ),
    # Transports. net.cc called its own sendResources/recvResources until 2.18.
    WantedType("sendNetResources", ("sendNetResources", "sendResources"), "transport/net.cc"),
    WantedType("recvNetResources", ("recvNetResources", "recvResources"), "transport/net.cc"),
    WantedType("coll_net.cc:sendResources", ("sendResources",), "transport/coll_net.cc"),
    WantedType("coll_net.cc:recvResources", ("recvResources",), "transport/coll_net.cc"),
    WantedType("connectMap", source_file="transport/net.cc"),
    WantedType("connectMapMem", source_file="transport/net.cc"),
    *_plain("shmSendResources", "shmRecvResources", "shmProxyInfo", "p2pResources", "p2pShm", "p2pShmProxyInfo"),
    # Network plugins and the built-in networks, down to the queue pairs.
    *_plain(
        "ncclNet_t",
        "ncclCollNet_t",
        "ncclNetDeviceHandle_t",
        "ncclNetSocketDev",
        "ncclNetSocketComm",
        "ncclNetSocketRequest",
        "ncclIbDev",
        "ncclIbMergedDev",
        "ncclIbNetCommBase",
        "ncclIbSendComm",
        "ncclIbRecvComm",
        "ncclIbQp",
        "ncclIbRequest",
        "ncclIbNetCommDevBase",
        "ibv_context",
        "ibv_context_ops",
        "ibv_qp",
        "ibv_cq",
    ),
)

ENUMS: tuple[WantedType, ...] = _plain(
    "ncclFunc_t",
    "ncclDataType_t",
    "ncclResult_t",
    "ncclPattern_t",
    "ncclDevRedOp_t",
    "ncclProxyOpState",
    "proxyConnectState",
    "ncclDevWorkType",
    "ncclDevWorkStorageType",
    "ncclNetDeviceType",
    "p2pType",
    "ncclTopoGdrMode",
)

SYMBOLS: tuple[str, ...] = (
    # Progress functions tell send from receive and one transport from another (ncclProxyArgs.progress).
    "net.cc:sendProxyProgress",
    "net.cc:recvProxyProgress",
    "coll_net.cc:sendProxyProgress",
    "coll_net.cc:recvProxyProgress",
    "shm.cc:shmSendProxyProgress",
    "shm.cc:shmRecvProxyProgress",
    "p2p.cc:p2pSendProxyProgress",
    "profiler.cc:profilerProxyProgress",
    # Threads of the proxy.
    "ncclProxyProgress",
    "ncclProxyService",
    # What NCCL itself keeps: the communicators of the RAS subsystem (2.24 and later), transports, networks, devices.
    "ncclComms",
    "nNcclComms",
    "p2pTransport",
    "shmTransport",
    "netTransport",
    "collNetTransport",
    "nvlsTransport",
    "profilerTransport",
    "ncclNetIb",
    "ncclNetSocket",
    "ncclIbDevs",
    "ncclNIbDevs",
    "ncclIbMergedDevs",
    "ncclNMergedIbDevs",
    "ncclNetSocketDevs",
    "ncclNetIfs",
)


def digest() -> str:
    """Changes whenever these lists do: layouts extracted for other lists are not reused."""
    data = [[asdict(entry) for entry in (*STRUCTS, *ENUMS)], SYMBOLS]
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:12]


# What are #define constants in NCCL, and so not in its debug information. The numbers only ever grew at the end.
ALGORITHMS: tuple[str, ...] = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
"""``NCCL_ALGO_*``: src/include/devcomm.h of v2.18.3-1, src/include/plugin/nccl_tuner.h of v2.30.7-1 (PAT from v2.23.4-1)."""

PROTOCOLS: tuple[str, ...] = ("LL", "LL128", "Simple")
"""``NCCL_PROTO_*``: the same headers."""

TRANSPORTS: tuple[str, ...] = ("p2p", "shm", "net", "collnet", "profiler")
"""``TRANSPORT_*`` (``ncclProxyConnection.transport``): src/include/transport.h, v2.18.3-1 to v2.30.7-1 (profiler from 2.26)."""
