"""Streams and buckets of the fleet: how they are called is in ``messaging/subjects.py``, how much they hold is here."""

from __future__ import annotations

from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError
from nats.js.kv import KeyValue

from ncclwatch.messaging.nats_stream import ensure_stream, replicas
from ncclwatch.messaging.subjects import BATCHES, REDUCED, VERDICTS, token_of

JOBS = "NCW_JOBS"
"""Stream of claims: which communicators are of one job."""
HEARD = "NCW_HEARD"
"""Bucket: up to which batch each partition was heard and sent on."""
ALL_CLAIMS = "ncw.jobs.*"

_MIB = 1 << 20
_STREAMS = {
    REDUCED: api.StreamConfig(name=REDUCED, subjects=["ncw.reduced.*.*"], max_age=600.0, max_bytes=2048 * _MIB),
    VERDICTS: api.StreamConfig(name=VERDICTS, subjects=["ncw.verdict.*"], max_age=30 * 86_400.0, max_bytes=512 * _MIB),
    JOBS: api.StreamConfig(name=JOBS, subjects=[ALL_CLAIMS], max_age=3600.0, max_bytes=128 * _MIB),
}
"""Bounds of streams where nobody has made them before; an administrator may have made others."""
NO_STORAGE = (10028, 10047)
"""Errors of a server, or an account, that may not hold so much."""
LEAST_BYTES = 8 * _MIB


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
            if name == BATCHES:
                await ensure_stream(jetstream)
                continue
            config = _STREAMS[name].evolve(
                discard=api.DiscardPolicy.OLD, storage=api.StorageType.FILE, duplicate_window=120.0,
                num_replicas=await replicas(jetstream),
            )  # fmt: skip
            while not await _add(jetstream, config):
                config = config.evolve(max_bytes=(config.max_bytes or 0) // 2)


async def _add(jetstream: JetStreamContext, config: api.StreamConfig) -> bool:
    """Whether the stream is there now; not where its account may not hold so much."""
    try:
        await jetstream.add_stream(config)
    except APIError as error:
        if error.err_code in NO_STORAGE and (config.max_bytes or 0) > LEAST_BYTES:
            return False
        raise
    return True


async def heard_bucket(jetstream: JetStreamContext) -> KeyValue:
    """The bucket of positions, made when it is not there."""
    try:
        return await jetstream.key_value(HEARD)
    except NotFoundError:
        copies = await replicas(jetstream)
        return await jetstream.create_key_value(
            api.KeyValueConfig(bucket=HEARD, history=1, storage=api.StorageType.FILE, replicas=copies)
        )
