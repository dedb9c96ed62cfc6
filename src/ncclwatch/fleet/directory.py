"""Which jobs there are: processes that share a communicator, directly or through others, are of one job.

Every hearing worker sees some of the nodes. What it finds joined it claims, and everybody who reads the claims comes to the same
jobs, in whatever order and however often they come: a job is named by its oldest claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec

from ncclwatch.messaging.keys import job_of
from ncclwatch.messaging.limits import UNDECODABLE, FormatError
from ncclwatch.messaging.subjects import token_of

MAX_HASHES = 1 << 21
"""Communicators that are known at a time; a job of 100,000 ranks has some ten thousand."""
MAX_IN_CLAIM = 4096
DEFAULT = job_of("")
"""What configuration calls a job when it calls it nothing."""
FORGET_NS = 3600 * 10**9
"""A communicator that no claim names for an hour is gone."""
REFRESH_NS = 600 * 10**9
"""After so long a worker claims again what it still sees."""
FUTURE_NS = 300 * 10**9
"""A claim from further ahead than clocks differ is not believed."""


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """Communicators, by hash, that are of one job; ``name`` is that of the job and ``born_ns`` when it was first claimed
    (CLOCK_REALTIME). ``token``: the job that configuration names (``keys.job_of``); hashes of two of these have nothing in
    common.
    """

    token: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    born_ns: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    hashes: Annotated[list[int], msgspec.Meta(max_length=MAX_IN_CLAIM)]


_decoder = msgspec.msgpack.Decoder(Claim)


def encode(claim: Claim) -> bytes:
    """A claim as bytes."""
    return msgspec.msgpack.encode(claim)


def decode(data: bytes) -> Claim:
    """A claim; raises ``FormatError``."""
    try:
        claim: Claim = _decoder.decode(data)
    except UNDECODABLE as error:
        raise FormatError(f"this is no claim of a job: {error}") from error
    if any(not 0 < h < 1 << 64 for h in claim.hashes):
        raise FormatError("a claim of a job has a hash that is none")
    return claim


def name_of(token: str, comm_hash: int) -> str:
    """The name of a job after its first known communicator, one token of a subject."""
    return token_of(f"{comm_hash:016x}" if token == DEFAULT else f"{token}-{comm_hash:016x}")


class _Set:
    """One job: a tree of sets that were joined."""

    __slots__ = ("above", "born_ns", "claimed_ns", "name", "seen_ns", "size")

    def __init__(self, name: str, born_ns: int, seen_ns: int) -> None:
        self.name, self.born_ns, self.seen_ns = name, born_ns, seen_ns
        self.above: _Set | None = None
        self.claimed_ns = seen_ns
        self.size = 1


def _root(node: _Set) -> _Set:
    while node.above is not None:
        if node.above.above is not None:
            node.above = node.above.above
        node = node.above
    return node


class Directory:
    """Jobs by communicator. ``renamed`` collects names that were given up, each with the name its job has now."""

    def __init__(self) -> None:
        self._sets: dict[tuple[str, int], _Set] = {}
        self._named: dict[str, _Set] = {}
        self._seen: dict[tuple[str, int], int] = {}
        self.renamed: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return len(self._sets)

    @property
    def jobs(self) -> Iterator[str]:
        """Names of all jobs."""
        return iter(self._named)

    def job(self, token: str, comm_hash: int) -> str | None:
        """The name of a communicator's job."""
        found = self._sets.get((token, comm_hash))
        return None if found is None else _root(found).name

    def join(self, token: str, hashes: Sequence[int], now_ns: int) -> list[Claim]:
        """Communicators that one process has, the largest first, are of one job; claims that tell others, if this is news."""
        known = {id(_root(found)): _root(found) for h in hashes if (found := self._sets.get((token, h))) is not None}
        oldest = min(known.values(), key=lambda s: (s.born_ns, s.name), default=None)
        new = [h for h in hashes if (token, h) not in self._sets]
        if oldest is not None and not new and len(known) == 1:
            return self._refresh(token, hashes, oldest, now_ns)
        name, born = (oldest.name, oldest.born_ns) if oldest is not None else (name_of(token, hashes[0]), now_ns)
        claim = Claim(token, name, born, list(hashes)[:MAX_IN_CLAIM])
        self.take(claim, now_ns)
        return [claim]

    def _refresh(self, token: str, hashes: Sequence[int], whole: _Set, now_ns: int) -> list[Claim]:
        stale = [h for h in hashes if now_ns - self._seen[token, h] > REFRESH_NS]
        if not stale:
            return []
        for h in stale:
            self._seen[token, h] = now_ns
        return [Claim(token, whole.name, whole.born_ns, stale)]

    def name(self, token: str, name: str, now_ns: int) -> list[Claim]:
        """There is a job of this name that has no communicator yet; a claim that tells others, if this is news."""
        found = self._named.get(name)
        if found is not None and now_ns - found.seen_ns <= REFRESH_NS:
            return []
        claim = Claim(token, name, found.born_ns if found is not None else now_ns, [])
        self.take(claim, now_ns)
        return [claim]

    def take(self, claim: Claim, now_ns: int) -> None:
        """Take a claim, of this process or another; one from the future, or beyond what is kept, counts for nothing."""
        if claim.born_ns > now_ns + FUTURE_NS or len(self._sets) + len(claim.hashes) > MAX_HASHES:
            return
        named = self._named.get(claim.name)
        whole = named if named is not None else _Set(claim.name, claim.born_ns, now_ns)
        self._named.setdefault(claim.name, whole)
        whole.born_ns = min(whole.born_ns, claim.born_ns)
        whole.seen_ns = now_ns
        for h in claim.hashes:
            key = (claim.token, h)
            self._seen[key] = now_ns
            found = self._sets.get(key)
            if found is None:
                self._sets[key] = whole
            else:
                whole = self._unite(_root(found), whole)
        whole.seen_ns = now_ns

    def _unite(self, one: _Set, other: _Set) -> _Set:
        if one is other:
            return one
        older, younger = sorted((one, other), key=lambda s: (s.born_ns, s.name))
        del self._named[younger.name]
        self.renamed.append((younger.name, older.name))
        # The smaller tree goes below the larger one; name and age are those of the older.
        above, below = (older, younger) if older.size >= younger.size else (younger, older)
        above.name, above.born_ns = older.name, older.born_ns
        above.size += below.size
        above.seen_ns = max(older.seen_ns, younger.seen_ns)
        below.above = above
        self._named[above.name] = above
        return above

    def forget(self, now_ns: int) -> list[str]:
        """Drop what no claim has named for long; names of jobs that are gone."""
        for key in [key for key, seen in self._seen.items() if now_ns - seen > FORGET_NS]:
            del self._seen[key], self._sets[key]
        alive = {id(_root(found)) for found in self._sets.values()}
        gone = [name for name, s in self._named.items() if id(s) not in alive and now_ns - s.seen_ns > FORGET_NS]
        for name in gone:
            del self._named[name]
        return gone


def by_size(communicators: Iterable[tuple[int, int]]) -> list[int]:
    """Hashes of communicators given as (hash, ranks), the largest first; those without a hash are left out."""
    return [h for h, _ in sorted((c for c in communicators if c[0]), key=lambda c: (-c[1], c[0]))]
