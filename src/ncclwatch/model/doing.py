"""What a process that holds others up was doing when it was looked at: a closed list, for matching and for words."""

from __future__ import annotations

from enum import StrEnum


class Doing(StrEnum):
    """What a process does, from its run state, its threads' kernel functions and its Python stack.

    The order is that of how much it explains: of several the first is told first.
    """

    GONE = "gone"
    ZOMBIE = "zombie"
    STOPPED = "stopped"
    TRACED = "traced"
    DISK_WAIT = "disk-wait"
    GIL_HELD = "gil-held"
    DATA_LOADER = "data-loader"
    CHECKPOINT = "checkpoint"
    COMPILING = "compiling"
    IMPORTING = "importing"
    IN_NCCL = "in-nccl"
    GPU_WAIT = "gpu-wait"
    USER_CODE = "user-code"
    UNKNOWN = "unknown"

    @property
    def words(self) -> str:
        """The clause that follows a rank's name."""
        return _WORDS[self]


_WORDS = {
    Doing.GONE: "is gone",
    Doing.ZOMBIE: "has ended, and its parent has not asked for its status (zombie)",
    Doing.STOPPED: "is stopped by a signal",
    Doing.TRACED: "is stopped by a debugger",
    Doing.DISK_WAIT: "waits in the kernel where no signal reaches it",
    Doing.GIL_HELD: "has a thread that holds the GIL while the main thread wants it",
    Doing.DATA_LOADER: "waits for its data loader",
    Doing.CHECKPOINT: "is in a checkpoint",
    Doing.COMPILING: "compiles",
    Doing.IMPORTING: "imports modules",
    Doing.IN_NCCL: "is in a call to NCCL or waits for one to end",
    Doing.GPU_WAIT: "waits for its GPU",
    Doing.USER_CODE: "is in code of its own",
    Doing.UNKNOWN: "shows nothing that tells what it does",
}
