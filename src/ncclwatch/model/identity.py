"""Identities: what makes a process, a communicator and an operation the same one over time and across nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ProcessKey:
    """One life of one process: a reused pid, or the same pid after exec of another NCCL, is a different process.

    ``pid`` is the pid in the agent's own pid namespace; ``start_time`` is in clock ticks since boot
    (``/proc/PID/stat`` field 22); ``build_id`` is the hexadecimal GNU build id of the binary that carries NCCL. ``part`` tells
    the ranks of a process apart that drives several GPUs: 0 for the first of them, else the CUDA device.
    """

    boot_id: str
    pid: int
    start_time: int
    build_id: str
    part: int = 0


@dataclass(frozen=True, slots=True, order=True)
class TraceId:
    """The key that joins what different planes and ranks say about one operation.

    ``comm_hash`` is ``ncclComm.commHash``, equal on all ranks of a communicator. ``sequence`` counts the operations of
    that communicator; it is only comparable between ranks after the ledger validated it (no NCCL counter lines
    ranks up by itself).
    """

    comm_hash: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.comm_hash:016x}/{self.sequence}"
