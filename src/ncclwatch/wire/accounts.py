"""What the kernel's accounts of queue pairs say: in flight, throughput over a sliding window, latency, errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ncclwatch.wire import abi, layouts

DEFAULT_WINDOW = 64
"""w of the sliding window in completions (MegaTrace III-B; VenusTrace 3.2.2 uses 50 and 64)."""

CTS_BYTES = 512
"""A clear-to-send write of NCCL carries at most 8 entries of 64 bytes (``ncclIbSendFifo``, net_ib.cc of v2.27.5-1)."""
FLUSH_BYTES = 8
"""A flush read of NCCL reads one ``int`` (ncclIbIflush, v2.18.3-1 … v2.30.7-1)."""


@dataclass(frozen=True)
class QueuePairAccount:
    """One queue pair at one reading of the maps. Counts are totals since it was first seen; times are CLOCK_MONOTONIC ns."""

    pid: int
    context: int
    number: int
    record: Any
    """The record of ``layouts.QP`` as read."""

    def __getattr__(self, name: str) -> int:
        """A counter of ``struct nwv_qp`` by its name, as a plain integer."""
        if name.startswith("_") or name not in (layouts.QP.names or ()):
            raise AttributeError(name)
        return int(self.record[name])

    @property
    def key(self) -> tuple[int, int, int]:
        """(pid, context, number)."""
        return self.pid, self.context, self.number

    @property
    def in_flight(self) -> int:
        """Signalled requests of the send queue whose completion is due. Posted receives are not among them."""
        return self.tail - self.head

    @property
    def receives_waiting(self) -> int:
        """Posted receives without completion: normal waiting."""
        return max(self.receives_posted - self.received, 0)

    @property
    def oldest_pending_ns(self) -> int | None:
        """When the oldest request in flight was posted, or ``None`` when nothing is in flight."""
        if not self.in_flight:
            return None
        return int(self.record["pending"][self.head % layouts.PENDING]["time_ns"])

    @property
    def newest_pending_ns(self) -> int | None:
        """When the newest request in flight was posted, or ``None`` when nothing is in flight."""
        if not self.in_flight:
            return None
        return int(self.record["pending"][(self.tail - 1) % layouts.PENDING]["time_ns"])

    @cached_property
    def opcodes(self) -> dict[str, tuple[int, int]]:
        """Operation → (requests, bytes) of those posted."""
        counts, sizes = self.record["opcode_count"], self.record["opcode_bytes"]
        return {abi.name_of(abi.Opcode, int(i)): (int(counts[i]), int(sizes[i])) for i in np.flatnonzero(counts)}

    @cached_property
    def error_statuses(self) -> dict[str, int]:
        """Status of a failed completion → how many."""
        counts = self.record["status_count"]
        return {abi.name_of(abi.Status, int(i)): int(counts[i]) for i in np.flatnonzero(counts) if i}

    @cached_property
    def window(self) -> npt.NDArray[Any]:
        """The last completions (``layouts.SAMPLE``), oldest first."""
        count = min(self.samples, layouts.WINDOW)
        order = (self.samples - count + np.arange(count, dtype="<u8")) % layouts.WINDOW
        return np.asarray(self.record["window"][order])

    def bandwidth(self, width: int = DEFAULT_WINDOW) -> float | None:
        """Bytes a second over the last ``width`` completions: (S_i − S_{i−w}) / (t_i − t_{i−w}); fewer as long as there are
        fewer.

        ``None`` before two completions were polled at different times.
        """
        samples = self.window[-(width + 1) :]
        if len(samples) < 2:
            return None
        elapsed = int(samples["time_ns"][-1]) - int(samples["time_ns"][0])
        if elapsed <= 0:
            return None
        return (int(samples["bytes"][-1]) - int(samples["bytes"][0])) * 1e9 / elapsed

    def mean_bandwidth(self) -> float | None:
        """Bytes a second from the first request seen to the last completion."""
        elapsed = self.last_completion_ns - self.first_ns
        return self.retired_bytes * 1e9 / elapsed if self.completed and elapsed > 0 else None

    def latency_ns(self, quantile: float) -> float | None:
        """Time from post to polled completion, as the upper bound of the bucket the quantile falls into (19 % wide at most 25
        %)."""
        return histogram_quantile(self.record["latency"], quantile)

    def role(self) -> str:
        """What this queue pair does for NCCL, by what was posted to it: ``data``, ``control`` (clear-to-send), ``flush`` or
        ``""``.

        A guess from sizes and operations for where NCCL's own structures do not tell (:mod:`ncclwatch.wire.flows`).
        """
        reads, read_bytes = self.opcodes.get("rdma-read", (0, 0))
        if reads and reads == self.posted and read_bytes <= FLUSH_BYTES * reads:
            return "flush"
        writes, write_bytes = self.opcodes.get("rdma-write", (0, 0))
        if self.receives_posted and writes and writes == self.posted and write_bytes <= CTS_BYTES * writes:
            return "control"
        return "data" if self.posted else ""


def decode(keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> Iterator[QueuePairAccount]:
    """Accounts from what :meth:`WireKernel.queue_pairs` returned."""
    for key, value in zip(keys, values, strict=True):
        yield QueuePairAccount(int(key["pid"]), int(key["context"]), int(key["qp_num"]), value)


def histogram_quantile(counts: npt.NDArray[Any], quantile: float) -> float | None:
    """Upper bound in ns of the latency bucket that the quantile (0 to 1) falls into; ``None`` for an empty histogram."""
    total = int(counts.sum())
    if not total:
        return None
    index = int(np.searchsorted(np.cumsum(counts), max(quantile * total, 1)))
    return float(layouts.bucket_bounds()[index + 1])


def merged_bandwidth(accounts: Iterable[QueuePairAccount], width: int = DEFAULT_WINDOW) -> float | None:
    """Bytes a second of several queue pairs together (those of one port), over the last ``width`` completions of all of them."""
    parts = [account.window for account in accounts if account.samples > 1]
    if not parts:
        return None
    times = np.concatenate([part["time_ns"][1:] for part in parts]).astype(np.int64)
    sizes = np.concatenate([np.diff(part["bytes"].astype(np.int64)) for part in parts])
    order = np.argsort(times, kind="stable")[-(width + 1) :]
    elapsed = int(times[order[-1]] - times[order[0]])
    return float(sizes[order[1:]].sum()) * 1e9 / elapsed if len(order) > 1 and elapsed > 0 else None
