"""libibverbs' public, frozen binary interface (``infiniband/verbs.h``, IBVERBS_1.1, x86-64), as far as the wire plane reads it.

rdma-core keeps these structures compatible since 2008 (new members go before ``verbs_context.context`` or after the end);
NCCL carries a copy of its own (``src/include/ibvcore.h``, the same in v2.18.3-1 … v2.30.7-1). ``tests/unit/wire/test_abi.py``
checks every number against the installed header. The same numbers are in ``bpftrace_probes/verbs.bpf.c``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

POINTER: Final = 8

CONTEXT_DEVICE: Final = 0
CONTEXT_OPS: Final = 8
CONTEXT_CMD_FD: Final = 264
CONTEXT_ASYNC_FD: Final = 268
CONTEXT_ABI_COMPAT: Final = 320
CONTEXT_SIZE: Final = 328
VERBS_CONTEXT_SZ: Final = -8
"""``verbs_context.sz`` lies right before the ``ibv_context`` inside it."""

ABI_IS_EXTENDED: Final = (1 << 64) - 1
"""``__VERBS_ABI_IS_EXTENDED``: what ``abi_compat`` holds for every provider since libibverbs 1.1.7."""

OPS: Final[dict[str, int]] = {"poll_cq": 11, "req_notify_cq": 12, "post_srq_recv": 20, "post_send": 25, "post_recv": 26}
"""Index of a function pointer in ``struct ibv_context_ops``."""

DEVICE_NAME: Final = 24
DEVICE_NAME_SIZE: Final = 64

QP_CONTEXT: Final = 0
QP_PD: Final = 16
QP_SEND_CQ: Final = 24
QP_RECV_CQ: Final = 32
QP_NUM: Final = 52
QP_STATE: Final = 56
QP_TYPE: Final = 60
QP_SIZE: Final = 160
"""``sizeof(struct ibv_qp)``; the members of an extended queue pair follow."""

QP_EX: Final[dict[str, int]] = {
    "wr_atomic_cmp_swp": 184,
    "wr_atomic_fetch_add": 192,
    "wr_bind_mw": 200,
    "wr_local_inv": 208,
    "wr_rdma_read": 216,
    "wr_rdma_write": 224,
    "wr_rdma_write_imm": 232,
    "wr_send": 240,
    "wr_send_imm": 248,
    "wr_send_inv": 256,
    "wr_send_tso": 264,
    "wr_set_inline_data": 288,
    "wr_set_inline_data_list": 296,
    "wr_set_sge": 304,
    "wr_set_sge_list": 312,
    "wr_start": 320,
    "wr_complete": 328,
    "wr_abort": 336,
    "wr_atomic_write": 344,
}
"""Offsets of the function pointers of ``struct ibv_qp_ex``."""

QP_EX_REQUIRED: Final = ("wr_start", "wr_complete", "wr_abort")
"""What every extended queue pair has; the others may be NULL."""

QP_EX_SIZE: Final = 352

CQ_CONTEXT: Final = 0
CQ_EX: Final[dict[str, int]] = {"start_poll": 144, "next_poll": 152, "end_poll": 160, "read_opcode": 168, "read_qp_num": 200}
"""Offsets of function pointers of ``struct ibv_cq_ex``."""
CQ_EX_SIZE: Final = 288


class QpType(IntEnum):
    """``enum ibv_qp_type``."""

    RC = 2
    UC = 3
    UD = 4
    RAW_PACKET = 8
    XRC_SEND = 9
    XRC_RECV = 10
    DRIVER = 0xFF


class QpState(IntEnum):
    """``enum ibv_qp_state``."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6
    UNKNOWN = 7


class Opcode(IntEnum):
    """``enum ibv_wr_opcode``: what a posted request does."""

    RDMA_WRITE = 0
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4
    ATOMIC_CMP_AND_SWP = 5
    ATOMIC_FETCH_AND_ADD = 6
    LOCAL_INV = 7
    BIND_MW = 8
    SEND_WITH_INV = 9
    TSO = 10
    DRIVER1 = 11
    FLUSH = 14
    ATOMIC_WRITE = 15


class Status(IntEnum):
    """``enum ibv_wc_status``: how a request ended."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21
    TM_ERR = 22
    TM_RNDV_INCOMPLETE = 23


def name_of(kind: type[IntEnum], value: int) -> str:
    """The name of a number of one of the enumerations, lower case with dashes; the number itself when it is newer than this
    list."""
    try:
        return kind(value).name.lower().replace("_", "-")
    except ValueError:
        return str(value)
