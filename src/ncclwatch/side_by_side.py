"""Work on many files by as many processes as there are CPUs for it, by one that may be lost, or by one beside this."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import IO, Any, NoReturn, TypeVar

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
    process goes on. What ``work`` raises is raised here. For one who has not begun any thread. (The standard library's
    processes take 30 ms to be imported, a tenth of what few files take.)
    """
    at = 0
    while at < len(items):
        worker, stream = _begin(work, items[at:])
        try:
            with stream:
                for said, made in iter(partial(_next, stream), None):
                    if not said:
                        raise made
                    at += 1
                    yield made
        finally:
            # Where nobody asks any more it ends with the item at hand: nobody takes what it says.
            _, status = os.waitpid(worker, 0)
        if at < len(items):
            yield lost(items[at], os.waitstatus_to_exitcode(status))
            at += 1


def beside(work: Callable[[T], R], items: Sequence[T], *, alone: bool = False) -> Generator[R, None, None]:
    """What ``work`` makes of each item, in order: of the second by another process while this one works on the first, unless
    ``alone``. For few items that take long: nothing but what is made of them is handed from process to process. What nobody
    asks for is not worked on, but for the second. For one who has not begun any thread.
    """
    if alone or len(items) < 2 or len(os.sched_getaffinity(0)) < 2:
        yield from map(work, items)
        return
    worker, stream = _begin(work, items[1:2])
    try:
        with stream:
            yield work(items[0])
            answer: Any = _next(stream)
    finally:
        os.waitpid(worker, 0)
    if answer is None:  # who has ended without a word (it ran out of memory) has done nothing
        answer = _tried(work, items[1])
    said, made = answer
    if not said:
        raise made
    yield made
    yield from map(work, items[2:])


def _begin(work: Callable[[T], R], items: Sequence[T]) -> tuple[int, IO[bytes]]:
    """Another process that works on items, and where it says what it has made of each."""
    reading, writing = os.pipe()
    if not (worker := os.fork()):
        os.close(reading)
        _work(work, items, writing)
    os.close(writing)
    return worker, os.fdopen(reading, "rb")


def _work(work: Callable[[T], R], items: Sequence[T], writing: int) -> NoReturn:
    """What the other process does. Nothing of this one's that is still to be written is written by it, too."""
    try:
        with os.fdopen(writing, "wb") as stream:
            for item in items:
                stream.write(pickle.dumps(_tried(work, item), pickle.HIGHEST_PROTOCOL))
                stream.flush()
    finally:
        os._exit(0)


def _tried(work: Callable[[T], R], item: T) -> tuple[bool, R | Exception]:
    try:
        return True, work(item)
    except Exception as error:
        return False, error


def _next(stream: IO[bytes]) -> Any:
    """What the other process said next; ``None`` where it has ended."""
    try:
        return pickle.load(stream)  # noqa: S301 - of a process that this one began
    except (EOFError, pickle.UnpicklingError):
        return None
