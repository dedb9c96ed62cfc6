"""What NCCL's own state in a process says of why it does not go on: a closed list, for matching and for words."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from ncclwatch.model.state import Communicator, ProcessSample

FEW_PENDING = 64
"""Operations; a pool has some thousand slots, so that so few do not fill it."""
WELL = frozenset({"ncclSuccess", "ncclInProgress"})


class Inside(StrEnum):
    """One thing that NCCL's memory says."""

    POOL_FULL = "proxy-pool-full"
    """No slot is left for what launches leave to the proxy thread, which has not taken what is there."""
    POOL_LEAKED = "proxy-pool-leaked"
    """No slot is left, though hardly any operation is there: the slots are lost."""
    ASYNC_ERROR = "async-error"
    ABORTED = "aborted"
    """Its abort flag is set."""
    REVOKED = "revoked"
    TEARDOWN = "teardown"
    """It is being finalised or destroyed."""


WORDS = {
    Inside.POOL_FULL: "no slot is left in the pool of proxy operations: a launch spins until the proxy takes what is there",
    Inside.POOL_LEAKED: "no slot is left in the pool of proxy operations, though hardly any is in use: a launch spins for ever",
    Inside.ABORTED: "its abort flag is set",
    Inside.REVOKED: "it is revoked",
    Inside.TEARDOWN: "it is being torn down (ncclCommFinalize or ncclCommDestroy was called)",
}


def inside(sample: ProcessSample) -> Iterator[tuple[Inside, str]]:
    """Everything that is so in a process, each with a clause that names the communicator."""
    for own in sample.communicators:
        for found in _of(own, sample):
            words = f"NCCL reports {own.async_result}" if found is Inside.ASYNC_ERROR else WORDS[found]
            yield found, f"communicator {own.hash:016x}: {words}"


def _of(own: Communicator, sample: ProcessSample) -> Iterator[Inside]:
    if own.proxy_pool_full:
        yield Inside.POOL_FULL if len(sample.pending) >= FEW_PENDING else Inside.POOL_LEAKED
    if own.async_result is not None and own.async_result not in WELL:
        yield Inside.ASYNC_ERROR
    if own.aborted:
        yield Inside.ABORTED
    if own.revoked:
        yield Inside.REVOKED
    if own.finalize_called or own.destroyed:
        yield Inside.TEARDOWN
