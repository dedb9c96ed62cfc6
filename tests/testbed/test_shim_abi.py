"""Our declarations of NCCL's profiler interface (profiler_abi.h) against the debug information of every libnccl at hand."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from testbed import gen_layout
from testbed.job import ROOT, available, library

if TYPE_CHECKING:
    import drgn

pytestmark = [pytest.mark.attach, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]

RELEASES = ("2.23.4", "2.26.2.post1", "2.27.5", "2.28.9", "2.30.4", "2.32.3")

COLL_FROM_V2 = {"commHash": "comm_hash", "seqNumber": "sequence", "func": "function", "count": "count", "root": "root",
                "datatype": "datatype"}  # fmt: skip
COLL_FROM_V4 = {"seqNumber": "sequence", "func": "function", "count": "count", "root": "root", "datatype": "datatype",
                "nChannels": "channels"}  # fmt: skip
P2P_FROM_V2 = {"commHash": "comm_hash", "func": "function", "count": "count", "peer": "peer", "datatype": "datatype"}
P2P_FROM_V4 = {"func": "function", "count": "count", "peer": "peer", "datatype": "datatype", "nChannels": "channels"}
PROXY_OP = {"pid": "pid", "channelId": "channel", "peer": "peer", "nSteps": "steps", "chunkSize": "chunk", "isSend": "is_send"}
KERNEL = {"channelId": "channel", "pTimer": "gpu_time"}


def parts(interface: int) -> list[tuple[str, str, dict[str, str]]]:
    """(member of NCCL's union, our structure, NCCL's member → ours)."""
    found = [("proxyOp", "nccl_proxy_op", PROXY_OP)]
    if interface == 1:
        found += [("coll", "nccl_coll_v1", COLL_FROM_V2), ("p2p", "nccl_p2p_v1", P2P_FROM_V2)]
    elif interface <= 3:
        found += [("coll", "nccl_coll_v3", COLL_FROM_V2), ("p2p", "nccl_p2p_v2", P2P_FROM_V2)]
    else:
        found += [("coll", "nccl_coll_v4", COLL_FROM_V4), ("p2p", "nccl_p2p_v4", P2P_FROM_V4)]
    if interface >= 3:
        found.append(("kernelCh", "nccl_kernel_ch", KERNEL if interface >= 4 else {"channelId": "channel"}))
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """``structure.member`` → offset and size, as gcc lays our header out."""
    folder: Path = tmp_path_factory.mktemp("abi")
    names = {
        (structure, own) for interface in range(1, 8) for _, structure, members in parts(interface) for own in members.values()
    }
    names |= {("nccl_event", member) for member in ("type_v1", "type_v5", "parent", "rank", "proxy_op", "coll_v4", "proxy_step")}
    lines = [
        f'printf("{s}.{m} %zu %zu\\n", __builtin_offsetof(struct {s}, {m}), sizeof(((struct {s} *)0)->{m}));'
        for s, m in sorted(names)
    ]
    source = folder / "abi.c"
    source.write_text('#include <stdio.h>\n#include "profiler_abi.h"\nint main(void) {\n' + "\n".join(lines) + "\nreturn 0;\n}\n")
    subprocess.run(["gcc", "-I", ROOT / "kernel_counters", "-o", folder / "abi", source], check=True, timeout=60)
    printed = subprocess.run([folder / "abi"], check=True, capture_output=True, text=True, timeout=10).stdout
    return {name: (int(offset), int(size)) for name, offset, size in (line.split() for line in printed.splitlines())}


def members(type_: drgn.Type) -> dict[str, tuple[int, drgn.Type]]:
    """Member → offset and type, those of an anonymous union among them."""
    found: dict[str, tuple[int, drgn.Type]] = {}
    for member in type_.members or ():
        offset, inner = member.bit_offset // 8, gen_layout.strip(member.type)
        if member.name:
            found[member.name] = (offset, inner)
        else:
            found |= {name: (offset + at, kind) for name, (at, kind) in members(inner).items()}
    return found


@pytest.mark.parametrize("version", RELEASES)
def test_offsets_and_sizes(version: str, ours: dict[str, tuple[int, int]]) -> None:
    import drgn

    if not available(version):
        pytest.skip(f"NCCL {version} is not in the cache")
    program = gen_layout.load(library(version))
    checked = 0
    for interface in range(1, 8):
        try:
            event = gen_layout.strip(program.type(f"ncclProfilerEventDescr_v{interface}_t"))
        except LookupError:
            continue
        checked += 1
        top = members(event)
        assert (top["type"][0], drgn.sizeof(top["type"][1])) == ours[
            "nccl_event.type_v1" if interface < 5 else "nccl_event.type_v5"
        ]
        assert (top["parentObj"][0], top["rank"][0]) == (ours["nccl_event.parent"][0], ours["nccl_event.rank"][0])
        assert top["proxyStep"][0] == ours["nccl_event.proxy_step"][0]
        for name, structure, mapping in parts(interface):
            offset, type_ = top[name]
            assert offset == ours["nccl_event.coll_v4"][0] == ours["nccl_event.proxy_op"][0]
            inner = members(type_)
            for theirs, own in mapping.items():
                at, kind = inner[theirs]
                assert (at, drgn.sizeof(kind)) == ours[f"{structure}.{own}"], f"v{interface} {name}.{theirs}"
    assert checked >= 1
    states = dict(gen_layout.enumerators(program, "ncclProfilerEventState_t"))
    assert states["ncclProfilerProxyStepSendGPUWait"] == 8 and states["ncclProfilerProxyStepRecvGPUWait"] == 12
    assert states.get("ncclProfilerProxyStepSendPeerWait_v4", 20) == 20 and states.get("ncclProfilerKernelChStop", 22) == 22
