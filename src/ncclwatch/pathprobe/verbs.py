"""A tiny RDMA client and server of our own by ctypes on libibverbs: one reliable connection, zero-payload writes.

A write of no bytes carries nothing and touches no memory, and the other host's *adapter* acknowledges it without its process:
what comes back tells of the path and the adapters alone. Structures are those of infiniband/verbs.h (checked against the header
by tests/unit/pathprobe/test_pathprobe_abi.py); post_send and poll_cq are inline functions there and are called through
``ibv_context.ops``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from ctypes import POINTER, Structure, c_int, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from ncclwatch.errors import NcclwatchError
from ncclwatch.nic.rdma import SYS, RdmaPort, read_port
from ncclwatch.paths.ports import label_of
from ncclwatch.wire import abi

DEPTH = 16
TIMEOUT_EXPONENT = 14
"""Local acknowledge timeout 4.096 µs × 2^14 = 67 ms (IBTA 9.7.6.1.3)…"""
PATIENT_EXPONENT = 18
"""…or 1.1 s, where acknowledgements are expected to wait in queues…"""
RETRIES = 3
"""…and so often again: a dead path is told within a second or two."""
HOP_LIMIT = 64
_STATE, _PKEY_INDEX, _PORT, _ACCESS = 1 << 0, 1 << 4, 1 << 5, 1 << 3
_AV, _PATH_MTU, _DEST_QPN, _RQ_PSN, _MAX_DEST_RD, _MIN_RNR = 1 << 7, 1 << 8, 1 << 20, 1 << 12, 1 << 17, 1 << 15
_TIMEOUT, _RETRY_CNT, _RNR_RETRY, _SQ_PSN, _MAX_RD = 1 << 9, 1 << 10, 1 << 11, 1 << 16, 1 << 13
_REMOTE_WRITE = 2
_SIGNALED = 2
_MTU_1024 = 3
"""Any port takes it; nothing is sent that is longer."""


class QpCap(Structure):
    """``struct ibv_qp_cap``."""

    _fields_: ClassVar[Any] = [
        (name, c_uint32) for name in ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data")
    ]


class QpInitAttr(Structure):
    """``struct ibv_qp_init_attr``."""

    _fields_: ClassVar[Any] = [
        *((name, c_void_p) for name in ("qp_context", "send_cq", "recv_cq", "srq")),
        ("cap", QpCap),
        ("qp_type", c_int),
        ("sq_sig_all", c_int),
    ]


class Gid(ctypes.Union):
    """``union ibv_gid``, aligned to 8 bytes as in C."""

    _fields_: ClassVar[Any] = [("raw", c_uint8 * 16), ("words", c_uint64 * 2)]


class GlobalRoute(Structure):
    """``struct ibv_global_route``."""

    _fields_: ClassVar[Any] = [
        ("dgid", Gid),
        ("flow_label", c_uint32),
        ("sgid_index", c_uint8),
        ("hop_limit", c_uint8),
        ("traffic_class", c_uint8),
    ]


class AhAttr(Structure):
    """``struct ibv_ah_attr``."""

    _fields_: ClassVar[Any] = [
        ("grh", GlobalRoute),
        ("dlid", c_uint16),
        *((name, c_uint8) for name in ("sl", "src_path_bits", "static_rate", "is_global", "port_num")),
    ]


class QpAttr(Structure):
    """``struct ibv_qp_attr``."""

    _fields_: ClassVar[Any] = [
        *((name, c_int) for name in ("qp_state", "cur_qp_state", "path_mtu", "path_mig_state")),
        *((name, c_uint32) for name in ("qkey", "rq_psn", "sq_psn", "dest_qp_num", "qp_access_flags")),
        ("cap", QpCap),
        ("ah_attr", AhAttr),
        ("alt_ah_attr", AhAttr),
        ("pkey_index", c_uint16),
        ("alt_pkey_index", c_uint16),
        *(
            (name, c_uint8)
            for name in (
                "en_sqd_async_notify",
                "sq_draining",
                "max_rd_atomic",
                "max_dest_rd_atomic",
                "min_rnr_timer",
                "port_num",
                "timeout",
                "retry_cnt",
                "rnr_retry",
                "alt_port_num",
                "alt_timeout",
            )
        ),
        ("rate_limit", c_uint32),
    ]


class SendWr(Structure):
    """``struct ibv_send_wr``; what follows ``rkey`` is of no concern to a write."""

    _fields_: ClassVar[Any] = [
        ("wr_id", c_uint64),
        ("next", c_void_p),
        ("sg_list", c_void_p),
        ("num_sge", c_int),
        ("opcode", c_int),
        ("send_flags", c_uint32),
        ("imm_data", c_uint32),
        ("remote_addr", c_uint64),
        ("rkey", c_uint32),
        ("rest", c_uint8 * 76),
    ]


class WorkCompletion(Structure):
    """``struct ibv_wc``."""

    _fields_: ClassVar[Any] = [
        ("wr_id", c_uint64),
        *(
            (name, c_uint32)
            for name in ("status", "opcode", "vendor_err", "byte_len", "imm_data", "qp_num", "src_qp", "wc_flags")
        ),
        ("pkey_index", c_uint16),
        ("slid", c_uint16),
        ("sl", c_uint8),
        ("dlid_path_bits", c_uint8),
    ]


class VerbsError(NcclwatchError):
    """A verbs call failed; ``code`` is its errno (0: none given)."""

    def __init__(self, message: str, hint: str = "", code: int = 0) -> None:
        self.code = code
        super().__init__(message, hint)


@dataclass(frozen=True, slots=True)
class Address:
    """How one end of the connection is reached: what both ends tell each other."""

    qp: int
    psn: int
    gid: str
    lid: int

    def to_json(self) -> dict[str, Any]:
        """As a message holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Address:
        """The address in a message; raises :class:`VerbsError` for anything else."""
        try:
            qp, psn, lid, gid = int(data["qp"]), int(data["psn"]), int(data["lid"]), str(data["gid"])
            if not (0 < qp < 1 << 24 and 0 <= psn < 1 << 24 and 0 <= lid < 1 << 16 and len(_gid_bytes(gid)) == 16):
                raise ValueError
        except (TypeError, ValueError, KeyError, OverflowError):
            raise VerbsError("the other side gave no address of a queue pair") from None
        return cls(qp, psn, gid, lid)


def _gid_bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", "")) if len(text) == 39 else b""


def pick_gid(port: RdmaPort, index: int | None = None) -> tuple[int, str]:
    """(index, value) of the GID to use: the one asked for, else RoCE v2 over IPv4, else any RoCE v2, else the first."""
    if index is not None:
        found = next((gid for gid in port.gids if gid.index == index), None)
        if found is None:
            raise VerbsError(f"{port.name} has no GID {index}", "see /sys/class/infiniband/*/ports/*/gids")
        return found.index, found.value
    if not port.gids:
        raise VerbsError(f"{port.name} has no GID", "is its port up, and has its network device an address?")

    def preference(kind: str, value: str) -> int:
        second = "v2" in kind.lower()
        return 0 if second and value.startswith("0000:0000:0000:0000:0000:ffff:") else 1 if second else 2

    best = min(port.gids, key=lambda gid: (preference(gid.kind, gid.value), gid.index))
    return best.index, best.value


def _library() -> Any:
    try:
        library = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    except OSError as error:
        raise VerbsError(f"no libibverbs: {error}", "install libibverbs1 and ibverbs-providers") from None
    for name, result, arguments in (
        ("ibv_get_device_list", POINTER(c_void_p), [POINTER(c_int)]),
        ("ibv_free_device_list", None, [POINTER(c_void_p)]),
        ("ibv_get_device_name", ctypes.c_char_p, [c_void_p]),
        ("ibv_open_device", c_void_p, [c_void_p]),
        ("ibv_close_device", c_int, [c_void_p]),
        ("ibv_alloc_pd", c_void_p, [c_void_p]),
        ("ibv_dealloc_pd", c_int, [c_void_p]),
        ("ibv_create_cq", c_void_p, [c_void_p, c_int, c_void_p, c_void_p, c_int]),
        ("ibv_destroy_cq", c_int, [c_void_p]),
        ("ibv_create_qp", c_void_p, [c_void_p, POINTER(QpInitAttr)]),
        ("ibv_modify_qp", c_int, [c_void_p, POINTER(QpAttr), c_int]),
        ("ibv_destroy_qp", c_int, [c_void_p]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_POST = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(SendWr), POINTER(c_void_p), use_errno=True)
_POLL = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, POINTER(WorkCompletion), use_errno=True)


class QueuePairProbe:
    """One queue pair on a port of a device. A context manager; :meth:`connect` it to the other end's address, then
    :meth:`write`.
    """

    def __init__(self, device: str, port: int = 1, gid_index: int | None = None, sys: Path = SYS) -> None:
        self.device, self.port = device, port
        self._made: list[tuple[str, int]] = []
        self._library = _library()
        state = read_port(device, port, sys)
        if state is None:
            raise VerbsError(f"there is no RDMA port {device}:{port}", "see 'ncclwatch doctor' for the ports of this node")
        if not state.is_up:
            raise VerbsError(
                f"{state.name} is {state.state or 'not active'}", f"bring {state.netdev or device} up", errno.ENETDOWN
            )
        self._gid_index, gid = pick_gid(state, gid_index)
        self._is_infiniband = state.link_layer == "InfiniBand"
        self._psn = int.from_bytes(os.urandom(3), "big")
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        self.address = Address(self._word32(self._qp + abi.QP_NUM), self._psn, gid, state.lid or 0)

    def __enter__(self) -> QueuePairProbe:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Destroy what was made, newest first."""
        while self._made:
            function, handle = self._made.pop()
            getattr(self._library, function)(handle)

    def _open(self) -> None:
        context = self._make("ibv_close_device", self._open_device(), f"cannot open {self.device}")
        pd = self._make("ibv_dealloc_pd", self._library.ibv_alloc_pd(context), "no protection domain")
        self._cq = self._make("ibv_destroy_cq", self._library.ibv_create_cq(context, DEPTH, None, None, 0), "no completion queue")
        wanted = QpInitAttr(send_cq=self._cq, recv_cq=self._cq, qp_type=int(abi.QpType.RC), sq_sig_all=1)
        wanted.cap = QpCap(DEPTH, 1, 1, 1, 0)
        self._qp = self._make("ibv_destroy_qp", self._library.ibv_create_qp(pd, ctypes.byref(wanted)), "no queue pair")
        functions = context + abi.CONTEXT_OPS
        self._post = _POST(self._word64(functions + abi.OPS["post_send"] * abi.POINTER))
        self._poll = _POLL(self._word64(functions + abi.OPS["poll_cq"] * abi.POINTER))

    def _make(self, undo: str, handle: int | None, failure: str) -> int:
        if not handle:
            code = ctypes.get_errno()
            hint = "run as root, and raise the locked-memory limit" if code in (errno.EPERM, errno.EACCES, errno.ENOMEM) else ""
            raise VerbsError(f"{failure}: {os.strerror(code) if code else 'refused'}", hint, code)
        self._made.append((undo, handle))
        return handle

    def _open_device(self) -> int | None:
        number = c_int()
        devices = self._library.ibv_get_device_list(ctypes.byref(number))
        if not devices:
            raise VerbsError("the RDMA devices cannot be listed", "load ib_uverbs: modprobe ib_uverbs", ctypes.get_errno())
        try:
            for index in range(number.value):
                if self._library.ibv_get_device_name(devices[index]) == self.device.encode():
                    opened: int | None = self._library.ibv_open_device(devices[index])
                    return opened
        finally:
            self._library.ibv_free_device_list(devices)
        raise VerbsError(f"libibverbs does not know {self.device}", "install ibverbs-providers; load ib_uverbs")

    @staticmethod
    def _word64(address: int) -> int:
        return c_uint64.from_address(address).value

    @staticmethod
    def _word32(address: int) -> int:
        return c_uint32.from_address(address).value

    def connect(self, other: Address, source_port: int = 0) -> None:
        """Bring the queue pair to "ready to send" towards the other end, over RoCE v2 by this source port (0: the driver's).

        Raises :class:`VerbsError`, with the errno of a missing route where the kernel finds none.
        """
        init = QpAttr(qp_state=int(abi.QpState.INIT), port_num=self.port, qp_access_flags=_REMOTE_WRITE)
        self._modify(init, _STATE | _PKEY_INDEX | _PORT | _ACCESS)
        ready = QpAttr(
            qp_state=int(abi.QpState.RTR),
            path_mtu=_MTU_1024,
            dest_qp_num=other.qp,
            rq_psn=other.psn,
            max_dest_rd_atomic=1,
            min_rnr_timer=12,
        )
        ready.ah_attr.dlid = other.lid
        ready.ah_attr.port_num = self.port
        ready.ah_attr.is_global = 0 if self._is_infiniband and other.lid else 1
        ready.ah_attr.grh.dgid.raw[:] = list(_gid_bytes(other.gid))
        ready.ah_attr.grh.sgid_index = self._gid_index
        ready.ah_attr.grh.hop_limit = HOP_LIMIT
        ready.ah_attr.grh.flow_label = label_of(source_port) if source_port else 0
        self._modify(ready, _STATE | _AV | _PATH_MTU | _DEST_QPN | _RQ_PSN | _MAX_DEST_RD | _MIN_RNR)
        send = QpAttr(
            qp_state=int(abi.QpState.RTS),
            timeout=PATIENT_EXPONENT if source_port else TIMEOUT_EXPONENT,
            retry_cnt=RETRIES,
            rnr_retry=RETRIES,
            sq_psn=self._psn,
            max_rd_atomic=1,
        )
        self._modify(send, _STATE | _TIMEOUT | _RETRY_CNT | _RNR_RETRY | _SQ_PSN | _MAX_RD)

    def _modify(self, attributes: QpAttr, mask: int) -> None:
        code = self._library.ibv_modify_qp(self._qp, ctypes.byref(attributes), mask)
        if code:
            state = abi.name_of(abi.QpState, attributes.qp_state)
            raise VerbsError(f"{self.device} refuses state {state}: {os.strerror(code)}", code=code)

    def write(self, timeout_s: float) -> tuple[abi.Status | int | None, float]:
        """One zero-payload write: (status of its completion, seconds until then); ``None`` when none came in time."""
        request = SendWr(wr_id=1, num_sge=0, opcode=int(abi.Opcode.RDMA_WRITE), send_flags=_SIGNALED)
        bad = c_void_p()
        began = time.perf_counter()
        code = self._post(self._qp, ctypes.byref(request), ctypes.byref(bad))
        if code:
            raise VerbsError(f"{self.device} does not take a request: {os.strerror(code)}", code=code)
        completion = WorkCompletion()
        while (elapsed := time.perf_counter() - began) < timeout_s:
            found = self._poll(self._cq, 1, ctypes.byref(completion))
            if found < 0:
                raise VerbsError(f"{self.device} cannot be polled")
            if found:
                status = int(completion.status)
                return (abi.Status(status) if status in abi.Status.__members__.values() else status), elapsed
            if elapsed > 0.002:
                time.sleep(0.0005)
        return None, time.perf_counter() - began
