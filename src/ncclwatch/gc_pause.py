"""Python's cyclic garbage collector, and when it is in the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Cyclic garbage waits until the block is left: among the records of thousands of ranks the collector would walk all of them
    over and over, for longer than the work itself takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
