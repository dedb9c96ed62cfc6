"""The log of a job's verdicts: one subject of a stream, to which only the judge of the moment can append.

Every record is appended with the expected last sequence of its subject, and every judge begins with a record of its own. So the
server refuses what an earlier judge says, however long that was stopped between its last check and its word. Each record also
carries what stands after it: whoever takes over reads one record.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import APIError, NotFoundError

from ncclwatch.errors import NcclwatchError
from ncclwatch.messaging.limits import UNDECODABLE
from ncclwatch.messaging.subjects import MESSAGE_ID, VERDICTS, verdict

WRONG_LAST = (10071, 10164)
"""Errors of the server for an append whose expected last sequence is not the last (``JSStreamWrongLastSequenceErrF``)."""
TRIES = 5
"""An append whose answer did not come is settled by looking at the log; so often at most in one call."""
MAX_TOLD = 256
"""Accusations of one finding that are remembered."""


class SupersededError(NcclwatchError):
    """Another judge has begun since: whoever gets this must not say anything more about the job."""


class State(msgspec.Struct, frozen=True, omit_defaults=True):
    """What stands after a record: ``finding`` counts troubles of the job from their first verdict to their recovery, ``told`` are
    the accusations of it (:func:`accusation`), empty while none is open; ``since_ns`` when the first was appended.
    """

    finding: int = 0
    told: tuple[str, ...] = ()
    since_ns: int = 0

    @property
    def is_open(self) -> bool:
        """Whether something was told that has not recovered."""
        return bool(self.told)


class Record(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One entry. ``id`` is the same for the same thing said again; ``epoch`` and ``judge`` say who said it. ``verdict`` has the
    shape ``ncclwatch.verdict/1``: the one told, in a takeover the last one of the finding that is open, in a recovery the one
    that is over, which stood for ``duration_s``. ``joined``: the job turned out to be part of the one named ``into``, whose judge
    says from then on what stands.
    """

    type: Literal["takeover", "verdict", "recovery", "joined"]
    job: str
    id: str
    at_ns: int
    epoch: int
    judge: str
    state: State
    verdict: dict[str, Any] | None = None
    duration_s: float | None = None
    into: str = ""


def accusation(shown: Mapping[str, Any]) -> str:
    """What a verdict accuses, whatever it knows besides: its class and its culprits, hashed."""
    named = sorted((c["rank"] if c["rank"] is not None else -1, c["host"], c["pid"] or 0) for c in shown["culprits"])
    return hashlib.sha256(json.dumps([shown["class"], named]).encode()).hexdigest()[:16]


def record_id(job: str, finding: int, what: str) -> str:
    """Stable over judges: the job, the number of the finding, and what is said in it."""
    return hashlib.sha256(json.dumps([job, finding, what]).encode()).hexdigest()[:20]


class VerdictLog:
    """The log of one job as one judge writes it. All methods run in the connection's thread."""

    def __init__(self, jetstream: JetStreamContext, job: str, judge: str) -> None:
        self.job, self.judge = job, judge
        self.epoch = 0
        self.state = State()
        self.standing: dict[str, Any] | None = None
        """The verdict that was told last and has not recovered."""
        self.sequence = 0
        self._jetstream = jetstream
        self._subject = verdict(job)

    async def last(self) -> tuple[int, Record | None]:
        """Sequence number and content of the last record; (0, ``None``) where there is none."""
        try:
            found = await self._jetstream.get_msg(VERDICTS, subject=self._subject)
        except NotFoundError:
            return 0, None
        try:
            return found.seq or 0, msgspec.json.decode(found.data or b"", type=Record)
        except UNDECODABLE as error:
            raise NcclwatchError(
                f"the last record of {self._subject} cannot be read: {error}", "remove it from the stream"
            ) from error

    async def take_over(self, epoch: int) -> Record:
        """Begin to judge under a lease of this epoch: the record of that, with what stands.

        Raises :class:`SupersededError` when a later judge has begun.
        """
        self.epoch = 0
        while True:
            sequence, found = await self.last()
            if found is not None and found.epoch >= epoch and (found.epoch, found.judge) != (epoch, self.judge):
                raise SupersededError(f"judge {found.judge} has begun to judge job {self.job}")
            self.sequence, self.state = sequence, State() if found is None else found.state
            self.standing = found.verdict if found is not None and self.state.is_open else None
            record = Record(
                type="takeover", job=self.job, id=record_id(self.job, epoch, f"takeover {self.judge}"), at_ns=time.time_ns(),
                epoch=epoch, judge=self.judge, state=self.state, verdict=self.standing,
            )  # fmt: skip
            try:
                await self._append(record)
            except SupersededError:
                # Somebody has said something just now: whether a later judge, the next look tells.
                continue
            self.epoch = epoch
            return record

    async def tell(self, shown: dict[str, Any]) -> Record | None:
        """Append a verdict that accuses; ``None`` when this finding has told the same before."""
        state, what = self.state, accusation(shown)
        if what in state.told:
            return None
        now = time.time_ns()
        finding = state.finding if state.is_open else state.finding + 1
        after = State(finding, (*state.told, what)[-MAX_TOLD:], state.since_ns if state.is_open else now)
        return await self._say("verdict", what, now, after, shown)

    async def recover(self) -> Record | None:
        """Append that what stands is over; ``None`` when nothing stands."""
        state, now = self.state, time.time_ns()
        if not state.is_open:
            return None
        duration_s = (now - state.since_ns) / 1e9
        return await self._say("recovery", "recovery", now, State(state.finding), self.standing, duration_s=duration_s)

    async def join(self, into: str) -> Record:
        """Append that this job turned out to be part of another."""
        return await self._say("joined", f"joined {into}", time.time_ns(), State(self.state.finding), self.standing, into=into)

    async def _say(
        self, kind: Literal["verdict", "recovery", "joined"], what: str, now: int, after: State, shown: dict[str, Any] | None,
        *, duration_s: float | None = None, into: str = "",
    ) -> Record:  # fmt: skip
        if not self.epoch:
            raise SupersededError(f"job {self.job} is judged by another")
        record = Record(
            type=kind, job=self.job, id=record_id(self.job, after.finding, what), at_ns=now, epoch=self.epoch, judge=self.judge,
            state=after, verdict=shown, duration_s=duration_s, into=into,
        )  # fmt: skip
        await self._append(record)
        return record

    async def _append(self, record: Record) -> None:
        """Append it once, whatever answers are lost; raises :class:`SupersededError`, or what kept the server from answering."""
        data = msgspec.json.encode(record)
        headers = {MESSAGE_ID: record.id, "Nats-Expected-Last-Subject-Sequence": str(self.sequence)}
        problem: Exception | None = None
        for _ in range(TRIES):
            try:
                answer = await self._jetstream.publish(self._subject, data, headers=headers)
                if not answer.duplicate:
                    self._now(answer.seq, record)
                    return
            except APIError as error:
                if error.err_code not in WRONG_LAST:
                    raise
            except (NatsError, TimeoutError) as error:
                problem = error
            # It may have been stored though no answer came, now or by a try before this one.
            try:
                sequence, found = await self.last()
            except (NatsError, TimeoutError) as error:
                problem = error
                continue
            if found is not None and (found.id, found.epoch, found.judge) == (record.id, record.epoch, record.judge):
                self._now(sequence, record)
                return
            if sequence != self.sequence:
                self.epoch = 0
                raise SupersededError(f"job {self.job} is judged by {found.judge if found is not None else 'another'} now")
        raise problem or TimeoutError

    def _now(self, sequence: int, record: Record) -> None:
        self.sequence, self.state = sequence, record.state
        self.standing = record.verdict if record.state.is_open else None
