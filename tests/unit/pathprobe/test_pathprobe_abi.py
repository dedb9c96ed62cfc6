"""The structures of the RDMA probe against what the C compiler makes of infiniband/verbs.h."""

from __future__ import annotations

import ctypes
from pathlib import Path

from ncclwatch.pathprobe import verbs
from unit.wire.test_abi import evaluate, needs_gcc, needs_verbs

STRUCTURES = {
    "ibv_qp_cap": verbs.QpCap,
    "ibv_qp_init_attr": verbs.QpInitAttr,
    "ibv_global_route": verbs.GlobalRoute,
    "ibv_ah_attr": verbs.AhAttr,
    "ibv_qp_attr": verbs.QpAttr,
    "ibv_send_wr": verbs.SendWr,
    "ibv_wc": verbs.WorkCompletion,
}
ELSEWHERE = {"remote_addr": "wr.rdma.remote_addr", "rkey": "wr.rdma.rkey"}
NUMBERS = {
    "IBV_QP_STATE": verbs._STATE, "IBV_QP_PKEY_INDEX": verbs._PKEY_INDEX, "IBV_QP_PORT": verbs._PORT,
    "IBV_QP_ACCESS_FLAGS": verbs._ACCESS, "IBV_QP_AV": verbs._AV, "IBV_QP_PATH_MTU": verbs._PATH_MTU,
    "IBV_QP_DEST_QPN": verbs._DEST_QPN, "IBV_QP_RQ_PSN": verbs._RQ_PSN, "IBV_QP_MAX_DEST_RD_ATOMIC": verbs._MAX_DEST_RD,
    "IBV_QP_MIN_RNR_TIMER": verbs._MIN_RNR, "IBV_QP_TIMEOUT": verbs._TIMEOUT, "IBV_QP_RETRY_CNT": verbs._RETRY_CNT,
    "IBV_QP_RNR_RETRY": verbs._RNR_RETRY, "IBV_QP_SQ_PSN": verbs._SQ_PSN, "IBV_QP_MAX_QP_RD_ATOMIC": verbs._MAX_RD,
    "IBV_ACCESS_REMOTE_WRITE": verbs._REMOTE_WRITE, "IBV_SEND_SIGNALED": verbs._SIGNALED, "IBV_MTU_1024": verbs._MTU_1024,
}  # fmt: skip


@needs_gcc
@needs_verbs
def test_structures_match_the_header(tmp_path: Path) -> None:
    wanted: dict[str, int] = dict(NUMBERS)
    for name, structure in STRUCTURES.items():
        wanted[f"sizeof(struct {name})"] = ctypes.sizeof(structure)
        for field, *_ in structure._fields_:
            if field != "rest":
                wanted[f"offsetof(struct {name}, {ELSEWHERE.get(field, field)})"] = getattr(structure, field).offset
    values = evaluate(tmp_path, "#include <infiniband/verbs.h>", list(wanted))
    assert dict(zip(wanted, values, strict=True)) == wanted
