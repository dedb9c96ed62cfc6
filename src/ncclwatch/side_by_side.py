"""Work on many files by as many processes as there are CPUs for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

MOST_PROCESSES = 8
"""Bound: processes at a time."""
T = TypeVar("T")
R = TypeVar("R")


def side_by_side(work: Callable[[T], R], items: Sequence[T], *, chunk: int) -> Iterator[R]:
    """What ``work`` makes of each item, in order; ``chunk`` items are handed to a process at a time, and back.

    ``work`` is a function of a module, and returns errors where those are wanted. A process that ends (it ran out of memory)
    takes what it had with it: that and the rest is worked on here. For one who has not begun any thread.
    """
    workers = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, -(-len(items) // chunk))
    done = 0
    if workers > 1:
        # Late: who looks at live processes need not wait for it.
        from concurrent.futures import ProcessPoolExecutor
        from concurrent.futures.process import BrokenProcessPool
        from multiprocessing import get_context

        # A fork has all modules already.
        with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
            made = pool.map(work, items, chunksize=chunk)
            try:
                for one in made:
                    done += 1
                    yield one
            except BrokenProcessPool:
                pass
    yield from map(work, items[done:])
