"""A rank whose loop is Python, on real NCCL: what happens to it happens in Python. The testbed starts it in place of its program.

    python python_rank.py LIBRARY FAULT FILE OPTIONS…

LIBRARY is the testbed's job as a library (``libtestjob.so``); OPTIONS are the job's. Once there is a FILE, the rank that it names
does what FAULT says:

loader   its loader's worker, a process, gives no batch any more
gil      a thread of its calls into C without letting go of the GIL (``ctypes.PyDLL``), and stays there
user     its main thread does something of its own
raise    its loop raises an exception that nobody catches
locked   its main thread sleeps in the kernel and holds the memory map: beside FILE lies ``mount``, as of ``locked.py``
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.queues
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

FOREVER_S = 600
PR_SET_PDEATHSIG = 1


def work(batches: multiprocessing.queues.Queue[int], file: Path) -> None:
    """The loader's worker: a batch whenever there is room, until it is stuck."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    number = 0
    while not struck(file):
        batches.put(number)
        number += 1
    time.sleep(FOREVER_S)


class Loader:
    """Batches of a worker process, a few ahead."""

    def __init__(self, file: Path) -> None:
        self._batches: multiprocessing.queues.Queue[int] = multiprocessing.Queue(2)
        multiprocessing.Process(target=work, args=(self._batches, file), daemon=True).start()

    def get_batch(self) -> int:
        """The next one; waits for it."""
        return self._batches.get()


def evaluate_prompts() -> None:
    """What only this rank does."""
    until = time.monotonic() + FOREVER_S
    while time.monotonic() < until:
        sum(range(1000))


def hold() -> None:
    """C code that does not let go of the GIL."""
    ctypes.PyDLL(None).sleep(FOREVER_S)


def struck(file: Path) -> bool:
    """Whether the fault is this rank's, and now."""
    return file.exists() and file.read_text() == os.environ["RANK"]


def main() -> None:
    """The rank, until it is ended."""
    library, fault, name, *options = sys.argv[1:]
    file = Path(name)
    # The worker begins before there is NCCL in this process, as a careful program has it.
    loader = Loader(file) if fault == "loader" else None
    job = ctypes.CDLL(library)
    words = [b"python_rank", *(option.encode() for option in options)]
    job.testjob_start(len(words), (ctypes.c_char_p * (len(words) + 1))(*words, None))
    while job.testjob_iterate():
        if loader is not None:
            loader.get_batch()
        elif struck(file):
            strike(fault, file)


def strike(fault: str, file: Path) -> None:
    """Do what the fault says, once."""
    if fault == "locked":
        runpy.run_path(str(Path(__file__).with_name("locked.py")))["be_stuck"](str(file.with_name("mount") / "file"))
    if fault == "raise":
        raise ValueError("the batch is empty")
    if fault == "user":
        evaluate_prompts()
    if fault == "gil" and threading.active_count() == 1:
        threading.Thread(target=hold, daemon=True).start()


if __name__ == "__main__":
    main()
