"""Functions of our own to try probes on: what one costs here, and what this kernel's probes can do."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ncclwatch.errors import NcclwatchError
from ncclwatch.target.maps import mapping_at, read_maps
from ncclwatch.wire import abi, layouts
from ncclwatch.wire.sites import Site

if TYPE_CHECKING:
    from types import TracebackType

    from ncclwatch.wire.kernel import WireKernel

_EMULATED, _STEPPED = bytes.fromhex("50415889c8c3"), bytes.fromhex("4889f889c8c3")
"""push rax; pop r8; mov eax, ecx; ret – and mov rax, rdi; mov eax, ecx; ret: each returns its fourth argument."""
_CODE = (_EMULATED, _STEPPED, _EMULATED)
_SPACING = 64

_WORDS = 64
_QP_WORD, _CQ_WORD, _REQUEST_WORD, _ELEMENT_WORD, _COMPLETION_WORD = 0, 24, 32, 40, 48
"""Where in the stand-in's memory its objects begin, in words of 8 bytes."""
_NUMBER = 0x4E57
_SIGNALED = 2


@lru_cache(maxsize=1)
def own_functions() -> tuple[int, int, int]:
    """Addresses of three tiny functions in a mapped file: breakpoints are only put into files, and never where code can be
    written. The second one begins with an instruction that must be single-stepped.
    """
    code = b"".join(function.ljust(_SPACING, b"\x90") for function in _CODE)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    with tempfile.TemporaryFile(prefix="ncclwatch-calibration-") as file:
        file.write(code)
        file.flush()
        address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, file.fileno(), 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise NcclwatchError(
            "cannot map code to measure the cost of a probe", "is the temporary folder mounted noexec? set TMPDIR"
        )
    return address, address + _SPACING, address + 2 * _SPACING


def own_function(which: int) -> Callable[[int, int, int, int], int]:
    """One of :func:`own_functions` as something to call; it returns its last argument."""
    word = ctypes.c_uint64
    function: Callable[[int, int, int, int], int] = ctypes.CFUNCTYPE(ctypes.c_int, word, word, word, ctypes.c_int)(
        own_functions()[which]
    )
    return function


class Program(StrEnum):
    """Programs of the data path that are tried."""

    POLL = "on_poll"
    POST = "on_post_send"


def calibration_sites(address: int, program: Program = Program.POLL) -> tuple[Site, Site]:
    """Entry and return of one of :func:`own_functions`."""
    pid = os.getpid()
    mapping = mapping_at(read_maps(pid), address)
    if mapping is None:
        raise NcclwatchError("the code to measure the cost of a probe is gone", "try again")
    path, offset = f"/proc/{pid}/map_files/{mapping.range_name}", address - mapping.start + mapping.offset
    entry = Site(pid, mapping.inode, offset, program, False, "calibration", path, "")
    return entry, Site(pid, mapping.inode, offset, f"{program}_return", True, "calibration", path, "")


class Calibrator:
    """A queue pair of nothing in our own memory, and calls that look to probes like a provider's posting and polling.

    Its account and our thread's are dropped in the end.
    """

    def __init__(self, kernel: WireKernel) -> None:
        self._kernel = kernel
        self._functions = [own_function(which) for which in range(len(_CODE))]
        self._memory = (ctypes.c_uint64 * _WORDS)()
        self._base = ctypes.addressof(self._memory)
        qp, completion = self._at(_QP_WORD), self._at(_COMPLETION_WORD)
        # A stand-in for everything: the context is only a number to the programs.
        self._set(qp + abi.QP_CONTEXT, self._base, 8)
        self._set(qp + abi.QP_SEND_CQ, self._at(_CQ_WORD), 8)
        self._set(qp + abi.QP_RECV_CQ, self._at(_CQ_WORD), 8)
        self._set(qp + abi.QP_NUM, _NUMBER, 4)
        self._set(self._at(_CQ_WORD) + abi.CQ_CONTEXT, self._base, 8)
        # struct ibv_send_wr: wr_id, next, sg_list, num_sge, opcode, send_flags; struct ibv_wc: wr_id, status, …, qp_num.
        request = self._at(_REQUEST_WORD)
        self._set(request + 16, self._at(_ELEMENT_WORD), 8)
        self._set(request + 24, 1, 4)
        self._set(request + 32, _SIGNALED, 4)
        self._set(completion + 28, _NUMBER, 4)

    def __enter__(self) -> Calibrator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        key = np.zeros(1, dtype=layouts.QP_KEY)
        key["context"], key["pid"], key["qp_num"] = self._base, os.getpid(), _NUMBER
        self._kernel.forget(key)

    def _at(self, word: int) -> int:
        return self._base + 8 * word

    @staticmethod
    def _set(address: int, value: int, size: int) -> None:
        ctypes.memmove(address, value.to_bytes(size, "little"), size)

    def sites(self, which: int, program: Program) -> tuple[Site, Site]:
        """Entry and return of one of the functions, for one program and its counterpart."""
        return calibration_sites(own_functions()[which], program)

    def poll(self, which: int, completions: int) -> None:
        """A poll that finds so many completions (none or one)."""
        self._functions[which](self._at(_CQ_WORD), 1, self._at(_COMPLETION_WORD), completions)

    def post(self, which: int) -> None:
        """A post of one signalled request, which is taken."""
        self._functions[which](self._at(_QP_WORD), self._at(_REQUEST_WORD), 0, 0)
