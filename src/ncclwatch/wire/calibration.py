"""What a probe costs here, measured on functions of our own."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

import numpy as np

from ncclwatch.wire import abi, layouts
from ncclwatch.wire.own_functions import COUNT, Program, calibration_sites, own_function, own_functions
from ncclwatch.wire.sites import Site

if TYPE_CHECKING:
    from types import TracebackType

    from ncclwatch.wire.kernel import WireKernel

_WORDS = 64
_QP_WORD, _CQ_WORD, _REQUEST_WORD, _ELEMENT_WORD, _COMPLETION_WORD = 0, 24, 32, 40, 48
"""Where in the stand-in's memory its objects begin, in words of 8 bytes."""
_NUMBER = 0x4E57
_SIGNALED = 2


class Calibrator:
    """A queue pair of nothing in our own memory, and calls that look to probes like a provider's posting and polling.

    Its account and our thread's are dropped in the end.
    """

    def __init__(self, kernel: WireKernel) -> None:
        self._kernel = kernel
        self._functions = [own_function(which) for which in range(COUNT)]
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
