"""Streams and buckets of the fleet: how they are called is in ``messaging/subjects.py``, how much they hold is here."""

from __future__ import annotations

from nats.js import JetStreamContext, api
from nats.js.errors import NotFoundError
from nats.js.kv import KeyValue

from ncclwatch.messaging.subjects import ALL_BATCHES, BATCHES, REDUCED, VERDICTS, token_of

JOBS = "NCW_JOBS"
"""Stream of claims: which communicators are of one job."""
HEARD = "NCW_HEARD"
"""Bucket: up to which batch each partition was heard and sent on."""
ALL_CLAIMS = "ncw.jobs.*"

_GIB = 1 << 30
_STREAMS = {
    BATCHES: api.StreamConfig(name=BATCHES, subjects=[ALL_BATCHES], max_age=1800.0, max_bytes=8 * _GIB),
    REDUCED: api.StreamConfig(name=REDUCED, subjects=["ncw.reduced.*.*"], max_age=600.0, max_bytes=4 * _GIB),
    VERDICTS: api.StreamConfig(name=VERDICTS, subjects=["ncw.verdict.*"], max_age=30 * 86_400.0, max_bytes=_GIB),
    JOBS: api.StreamConfig(name=JOBS, subjects=[ALL_CLAIMS], max_age=3600.0, max_bytes=_GIB),
}
"""Bounds of streams where nobody has made them before; an administrator may have made others."""


def claims(worker: str) -> str:
    """Where a hearing worker says which communicators are of one job."""
    return f"ncw.jobs.{token_of(worker)}"


def need(worker: str) -> str:
    """Where a judge asks a hearing worker for messages that build on none before them."""
    return f"ncw.need.{token_of(worker)}"


def all_reduced(job: str) -> str:
    """What all hearing workers send of a job."""
    return f"ncw.reduced.{token_of(job)}.*"


async def ensure(jetstream: JetStreamContext, *names: str) -> None:
    """Make the streams that are not there."""
    for name in names:
        try:
            await jetstream.stream_info(name)
        except NotFoundError:
            await jetstream.add_stream(
                _STREAMS[name].evolve(discard=api.DiscardPolicy.OLD, storage=api.StorageType.FILE, duplicate_window=120.0)
            )


async def heard_bucket(jetstream: JetStreamContext) -> KeyValue:
    """The bucket of positions, made when it is not there."""
    try:
        return await jetstream.key_value(HEARD)
    except NotFoundError:
        return await jetstream.create_key_value(api.KeyValueConfig(bucket=HEARD, history=1, storage=api.StorageType.FILE))
