"""RAS in JSON (``SET FORMAT json``, 2.28.7 and later), parsed.

2.28.7 and 2.28.9 leave out the comma after ``nvml_dev`` of a missing rank (``jsonWriteMissingRank``,
``src/ras/client_support.cc``; right from 2.29.2 on): where the answer is no JSON, it is tried again with those commas.
"""

from __future__ import annotations

import re
import time
from typing import Annotated

import msgspec

from ncclwatch.ingest.base import NEWEST_S, IngestError
from ncclwatch.ingest.ras_answer import (
    MAX_NAMED,
    MAX_RANKS,
    RasAnswer,
    RasCommunicator,
    RasMissing,
    RasRank,
    result_name,
    version_of,
)

_MISSING_COMMA = re.compile(rb'("nvml_dev": -?\d{1,9})(\s+"status")')
_TIME = "%Y-%m-%d %H:%M:%S"
_Number = Annotated[int, msgspec.Meta(ge=-1, le=MAX_RANKS)]
_Pid = Annotated[int, msgspec.Meta(ge=-1, le=2**31)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Word = Annotated[str, msgspec.Meta(max_length=64)]


class _Status(msgspec.Struct):
    init_state: _Number | None = None
    async_error: _Number | None = None
    finalize_called: bool | None = None
    destroy_flag: bool | None = None
    abort_flag: bool | None = None


class _Missed(msgspec.Struct):
    unresponsive: bool | None = None
    considered_dead: bool | None = None


class _Place(msgspec.Struct):
    rank: _Number
    host: _Word = ""
    pid: _Pid = -1
    cuda_dev: _Number = -1

    def known(self) -> tuple[int, str, int, int | None]:
        """Rank, address, pid and device; empty and 0 where RAS did not find the process (``unknown``, pid -1)."""
        device = self.cuda_dev if self.cuda_dev >= 0 else None
        return self.rank, self.host if self.pid > 0 else "", max(self.pid, 0), device


class _Rank(_Place):
    status: _Status = msgspec.field(default_factory=_Status)
    collective_counts: dict[_Word, _Count] | None = None


class _MissingRank(_Place):
    status: _Missed = msgspec.field(default_factory=_Missed)


class _Communicator(msgspec.Struct):
    hash: _Word
    size: _Number
    secondary_hash: _Word = ""
    ranks: list[_Rank] = msgspec.field(default_factory=list)
    missing_ranks: list[_MissingRank] = msgspec.field(default_factory=list)


class _Ras(msgspec.Struct):
    timeouts_count: _Count = 0


class _Answer(msgspec.Struct):
    communicators: list[_Communicator]
    nccl_version: _Word = ""
    timestamp: _Word = ""
    ras: _Ras = msgspec.field(default_factory=_Ras)


_DECODER = msgspec.json.Decoder(_Answer)


def parse_json(data: bytes, source: str, written_s: float) -> RasAnswer:
    """An answer in JSON; what a connection said before it is skipped. ``written_s``: its time, if it does not tell one.

    Raises :class:`IngestError`.
    """
    body = data[max(data.find(b"{"), 0) :].rstrip(b"\0")
    try:
        said = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise IngestError(f"{source}: no answer of RAS in JSON: {error}", "ask again, and keep the whole answer") from None
    if sum(len(one.ranks) + len(one.missing_ranks) for one in said.communicators) > MAX_NAMED:
        raise IngestError(f"{source}: more than {MAX_NAMED} ranks", "this is no answer of RAS")
    stamp = _stamp(said.timestamp)
    answer = RasAnswer(source, written_s if stamp is None else stamp, stamp is not None, version_of(said.nccl_version))
    answer.every_rank, answer.timeouts = True, said.ras.timeouts_count
    for place, one in enumerate(said.communicators):
        communicator = _communicator(one, place, answer)
        if communicator is not None:
            answer.communicators.append(communicator)
    return answer


def _decode(body: bytes) -> _Answer:
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        repaired = _MISSING_COMMA.sub(rb"\1,\2", body)
        if repaired == body:
            raise
        return _DECODER.decode(repaired)


def _stamp(text: str) -> float | None:
    """Seconds since the epoch, of a time in the time zone of the job's node: taken for ours."""
    try:
        found = time.mktime(time.strptime(text, _TIME))
    except (ValueError, OverflowError):
        return None
    return found if 0 <= found <= NEWEST_S else None


def _communicator(one: _Communicator, place: int, answer: RasAnswer) -> RasCommunicator | None:
    where = f"{answer.source}: communicator {place}"
    digits = one.hash.removeprefix("0x")
    if not re.fullmatch(r"[0-9a-f]{1,16}", digits) or one.size < 1:
        answer.problems.append(f"{where}: no hash or no size, left out")
        return None
    found = RasCommunicator(int(digits, 16), one.size, f"{one.hash}:{one.secondary_hash}")
    taken: set[int] = set()

    def is_new(rank: int) -> bool:
        if 0 <= rank < one.size and rank not in taken:
            taken.add(rank)
            return True
        answer.problems.append(f"{where}: rank {rank} of {one.size}, or there twice, left out")
        return False

    found.ranks = [_rank(rank) for rank in one.ranks if is_new(rank.rank)]
    found.missing = [_missing(rank) for rank in one.missing_ranks if is_new(rank.rank)]
    return found


def _rank(rank: _Rank) -> RasRank:
    status = rank.status
    return RasRank(
        *rank.known(),
        rank.collective_counts,
        None if status.init_state is None else result_name(status.init_state),
        None if status.async_error is None else result_name(status.async_error),
        status.finalize_called,
        status.destroy_flag,
        status.abort_flag,
    )


def _missing(rank: _MissingRank) -> RasMissing:
    return RasMissing(*rank.known(), rank.status.unresponsive, rank.status.considered_dead)
