"""Names on the bus: a tenant is an account of NATS, and inside one account these are the subjects, streams and buckets.

A token of a subject is ``[A-Za-z0-9_-]{1,64}``; every other name (a host with dots, say) is hashed into that form, so that no
name can hold a wildcard or reach another level. What of the subjects who may use: ``packaging/nats/``, ``docs/bus.md``.
"""

from __future__ import annotations

import hashlib
import re

BATCHES = "NCW_BATCHES"
"""Stream of what agents send, bounded by age and bytes."""
REDUCED = "NCW_REDUCED"
"""Stream of what hearing workers make for the judge of a job."""
VERDICTS = "NCW_VERDICTS"
"""Stream of verdicts; each appended with the expected last sequence of its subject."""
LEASES = "NCW_LEASES"
"""Bucket of keys and values: who judges a job."""

LIFE, NUMBER, KEY, FORMAT = "Ncw-Life", "Ncw-N", "Ncw-Key", "Ncw-Format"
"""Headers of a batch: the life of the agent and the batch's number in it; ``1`` where it builds on none before it; the version of
the format (``packing.VERSION``).
"""
MESSAGE_ID = "Nats-Msg-Id"
"""JetStream's own header, by which it drops what it has: ``<life>:<n>``."""

PARTITIONS = 32
"""Into so many parts an account's mapping divides nodes, by a hash of their name: more workers than that have nothing to do."""
MAPPING = f'"ncw.batch.*.*": "ncw.batch.{{{{partition({PARTITIONS},2)}}}}.{{{{wildcard(1)}}}}.{{{{wildcard(2)}}}}"'
"""That mapping, as a server's configuration has it. It is the server's and not the agent's to say which part a node is of."""

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_BATCH = re.compile(r"ncw\.batch\.(?:[0-9]{1,3}\.)?([A-Za-z0-9_-]{1,64})\.([A-Za-z0-9_-]{1,64})\Z")
_INBOX = re.compile(r"(_INBOX|_R_)\.[A-Za-z0-9_.-]{1,200}\Z")
SAID_BATCHES = "ncw.batch.*.*"
"""Batches as agents send them, and as they are in the stream where the account maps nothing."""
ALL_BATCHES = "ncw.batch.>"
"""Batches in the stream, mapped or not."""
ALL_PINGS = "ncw.ping.*.*"
ALL_WATCHES = "ncw.watch.*"


def token_of(name: str) -> str:
    """A name as one token of a subject: as it is where it fits, else hashed (22 characters that begin with ``h-``)."""
    if _TOKEN.match(name):
        return name
    return "h-" + hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:20]


def batch(job: str, node: str) -> str:
    """Where the agent of a node sends its batches. ``job`` is what names it (``keys.job_of``), never the secret token."""
    return f"ncw.batch.{token_of(job)}.{token_of(node)}"


def part(number: int) -> str:
    """Batches of one part of the nodes in the stream."""
    return f"ncw.batch.{number}.*.*"


def ask(job: str, node: str) -> str:
    """Where an engine speaks to the agent of a node."""
    return f"ncw.ask.{token_of(job)}.{token_of(node)}"


def ping(job: str, node: str) -> str:
    """Where an agent asks for an engine's clock."""
    return f"ncw.ping.{token_of(job)}.{token_of(node)}"


def watch(job: str) -> str:
    """Where a viewer says that it wants to see a job."""
    return f"ncw.watch.{token_of(job)}"


def view(job: str) -> str:
    """Where an engine shows a job."""
    return f"ncw.view.{token_of(job)}"


def reduced(job: str, worker: str) -> str:
    """Where a hearing worker sends what it reduced of a job."""
    return f"ncw.reduced.{token_of(job)}.{token_of(worker)}"


def verdict(job: str) -> str:
    """Where the verdicts of a job are appended."""
    return f"ncw.verdict.{token_of(job)}"


def batch_parts(subject: str) -> tuple[str, str] | None:
    """Job and node of a batch's subject, mapped or not; ``None`` for a subject that is none."""
    found = _BATCH.match(subject)
    return (found[1], found[2]) if found is not None else None


def is_inbox(subject: str) -> bool:
    """Whether an answer may go there: to an inbox, or to what a server makes of one between two accounts (``_R_``).

    An engine may say anything in its account, and whoever asks it something chooses the subject of the answer.
    """
    return _INBOX.match(subject) is not None
