"""Looks at processes that a verdict names, and at a few of their peers: where they stand, and the state of this node's GPUs.

They are read in a thread beside samples, since a process or a driver that hangs takes seconds. Each reader is a process of its
own that ends by itself or is ended. Nothing is stopped.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from ncclwatch.model.looks import ProcessLook
from ncclwatch.text import clean

if TYPE_CHECKING:
    from ncclwatch.model.gpu import GpuLook
    from ncclwatch.target.stacks import ProcessStack
    from ncclwatch.target.threads import ThreadRow

MOST = 8
"""Processes that are looked at for one order."""
WITHIN_S = 12.0
"""For all of them."""
GPUS_S = 2.0
"""What the driver of the GPUs is waited for."""
MAX_FRAMES, MAX_STATES = 64, 16


class SuspectLooks:
    """Looks when it is ordered, one order at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._found: list[ProcessLook] = []
        self._gpus: GpuLook | None = None

    def order(self, pids: Sequence[int], host: str, proxies: Mapping[int, Collection[int]]) -> bool:
        """Begin to look at these processes of this node, called ``host``; whether nobody else is looked at yet. ``proxies``: the
        ids of NCCL's progress threads in each (``Communicator.proxy_thread``).
        """
        if self._thread is not None and self._thread.is_alive():
            return False
        self._thread = threading.Thread(
            target=self._look, args=(tuple(pids[:MOST]), host, dict(proxies)), name="ncclwatch-suspects", daemon=True
        )
        self._thread.start()
        return True

    @property
    def has_news(self) -> bool:
        """Whether something was seen that nobody has taken."""
        return bool(self._found) or self._gpus is not None

    def take(self) -> tuple[tuple[ProcessLook, ...], GpuLook | None]:
        """What was seen since the last time."""
        with self._lock:
            found, self._found = self._found, []
            gpus, self._gpus = self._gpus, None
        return tuple(found), gpus

    def _look(self, pids: Sequence[int], host: str, proxies: Mapping[int, Collection[int]]) -> None:
        from ncclwatch.gpu.health import look_at_gpus
        from ncclwatch.probes.capabilities import inherited
        from ncclwatch.target.stacks import read_stacks

        try:
            with inherited():
                found = [process_look(stack, host) for stack in read_stacks(pids, within_s=WITHIN_S, proxies=proxies)]
                gpus = look_at_gpus(GPUS_S)
        except Exception as error:
            # What is read there can be anything: it must not end in more than a line.
            problem = clean(f"not read ({type(error).__name__}: {error})")
            found, gpus = [ProcessLook(host, pid, time.time(), "?", problem=problem) for pid in pids], None
        with self._lock:
            self._found += found
            self._gpus = gpus


def process_look(stack: ProcessStack, host: str) -> ProcessLook:
    """A process's stack as it travels."""
    frames = stack.main.frames if stack.main is not None else ()
    holder = stack.holder.frames if stack.gil_held and stack.holder is not None else ()
    return ProcessLook(
        host, stack.pid, stack.time, stack.state,
        tuple(islice(dict.fromkeys(row.state for row in stack.rows), MAX_STATES)),
        tuple((clean(one.name), clean(one.file), clean(one.text)) for one in frames[:MAX_FRAMES]),
        stack.gil_held, tuple(clean(one.text) for one in holder[:MAX_FRAMES]), "; ".join(_kernel(stack)),
        clean(stack.problem or stack.python.problem), stack.python.seconds,
    )  # fmt: skip


def _kernel(stack: ProcessStack) -> Iterator[str]:
    """``main thread sleeping in futex_do_wait (futex)``, ``proxy thread running``, ``1 thread in disk sleep: nfs_wait``."""
    if stack.main_row is not None:
        yield f"main thread {_where(stack.main_row)}"
    for where, number in Counter(map(_where, stack.proxies)).items():
        yield f"{f'{number} proxy threads' if number > 1 else 'proxy thread'} {where}"
    stuck = sorted({other.wchan or "?" for other in stack.rows if other.state == "disk sleep"})
    number = sum(other.state == "disk sleep" for other in stack.rows)
    if number:
        yield f"{number} thread{'s' if number > 1 else ''} in disk sleep: {', '.join(stuck[:4])}"


def _where(row: ThreadRow | None) -> str:
    """``sleeping in futex_do_wait (futex)``."""
    if row is None:
        return "gone"
    return row.state + (f" in {row.wchan}" if row.wchan else "") + (f" ({row.call})" if row.call else "")
