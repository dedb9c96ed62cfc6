"""Work on many files by as many processes as there are CPUs for it, or by one that may be lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

MOST_PROCESSES = 8
"""Bound: processes at a time."""
T = TypeVar("T")
R = TypeVar("R")


def side_by_side(
    work: Callable[[T], R], items: Sequence[T], *, chunk: int, lost: Callable[[T, int], R] | None = None
) -> Iterator[R]:
    """What ``work`` makes of each item, in order; ``chunk`` items are handed to a process at a time, and back.

    ``work`` is a function of a module, and returns errors where those are wanted. A process that ends (it ran out of memory)
    takes what it had with it: that and the rest is worked on here, with ``lost`` :func:`apart`. For one who has not begun any
    thread.
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
    yield from map(work, items[done:]) if lost is None else apart(work, items[done:], lost)


def apart(work: Callable[[T], R], items: Sequence[T], lost: Callable[[T, int], R]) -> Iterator[R]:
    """What ``work`` makes of each item, in order, by another process, for work that may end its process.

    Of an item at which it ends there is what ``lost`` makes of it and of the exit code (a signal's number, below zero), and a new
    process goes on. For one who has not begun any thread.
    """
    from multiprocessing import get_context

    context = get_context("fork")
    at = 0
    while at < len(items):
        receiving, sending = context.Pipe(duplex=False)
        worker = context.Process(target=_each, args=(work, items[at:], sending), daemon=True)
        worker.start()
        sending.close()
        try:
            while at < len(items):
                made = receiving.recv()
                at += 1
                yield made
        except EOFError:
            worker.join()
            yield lost(items[at], worker.exitcode or 0)
            at += 1
        finally:
            receiving.close()
            worker.kill()
            worker.join()


def _each(work: Callable[[T], R], items: Sequence[T], sending: Connection) -> None:
    for item in items:
        sending.send(work(item))
