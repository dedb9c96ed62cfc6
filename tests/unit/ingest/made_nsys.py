"""Made-up exports of Nsight Systems, by the schema that NVIDIA documents; tables are made lazily, as it does."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Sequence
from pathlib import Path

BEGUN = 1_755_590_100_000_000_000
NAMES = ("sgemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclDevKernel_SendRecv", "ncclKernel_AllGather_RING_LL_Sum_int8_t")


def export(
    path: Path, kernels: Sequence[tuple[int, int, int, int, int]], *, launches: bool = False, started: int = BEGUN
) -> Path:
    """A file with kernels (name's number, start, end, GPU, stream)."""
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(NAMES))
        database.execute("CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT)")
        database.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?, '', '')", (started,))
        if kernels:
            database.execute(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, "
                "deviceId INTEGER NOT NULL, "
                "contextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, "
                "shortName INTEGER NOT NULL)"
            )
            database.executemany(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, 1, ?, ?, 281479271677952, ?, ?)",
                [(start, end, gpu, stream, at, name, name) for at, (name, start, end, gpu, stream) in enumerate(kernels)],
            )
        if launches:
            database.execute(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER)"
            )
            database.executemany(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 281479271677953, ?)",
                [(start - 5_000, start, at) for at, (_, start, *_) in enumerate(kernels)],
            )
    database.close()
    return path


def rounds(rank: int, *, late: int | None = None, number: int = 30, stream: int = 20) -> list[tuple[int, int, int, int, int]]:
    """An AllReduce every 20 ms, and compute in between."""
    found = []
    for at in range(number):
        due = 1_000_000 + 20_000_000 * at
        end = due + (10_000_000 if late is not None else 900_000)
        begin = end - 900_000 if rank == late else due
        found += [(0, due - 500_000, due - 100, rank % 2, 7), (1, begin, end + 2_000 * rank, rank % 2, stream)]
    return found


COMMUNICATOR_OF = 0xC0FFEE00
SCHEMAS = {7: (("NCCL communicator ID", 0), ("Message size [bytes]", 8)), 9: (
    ("NCCL communicator ID", 0), ("No. of ranks", 8), ("Rank", 12), ("CUDA device", 16),
)}  # fmt: skip
"""By the number of a schema the fields of its payload with their places, as NCCL names them."""


def payload(schema: int, *fields: int) -> bytes:
    """``NVTX_EVENTS.binaryData``: a head of 32 bytes, and the fields."""
    packed = struct.pack("<QQ" if schema == 7 else "<Qiii", *fields)
    return struct.pack("<IIIIQQ", 3, 0, schema, 0, len(packed), 32 + len(packed)) + packed


def add_calls(path: Path, place: tuple[int, int], communicators: Sequence[int], *, as_text: bool = False) -> None:
    """Add NVTX ranges of NCCL to a file with launches: the making of a communicator of which it is rank ``place[0]`` of
    ``place[1]``, on GPU ``place[0] % 2``, and a call before each launch, of the communicators in turn.
    """
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE NVTX_PAYLOAD_SCHEMA_ENTRIES (domainId INTEGER NOT NULL, schemaId INTEGER NOT NULL, "
            "idx INTEGER NOT NULL, flags INTEGER, type INTEGER, name TEXT, description TEXT, arrayOrUnionDetail INTEGER, "
            "offset INTEGER)"
        )
        for schema, fields in SCHEMAS.items():
            database.executemany(
                "INSERT INTO NVTX_PAYLOAD_SCHEMA_ENTRIES VALUES (3, ?, ?, NULL, 18, ?, NULL, NULL, ?)",
                [(schema, at, name, offset or None) for at, (name, offset) in enumerate(fields)],
            )
        database.execute(
            "CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, "
            "globalTid INTEGER, domainId INTEGER, binaryData BLOB)"
        )
        launches = database.execute(
            "SELECT r.start, r.globalTid FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN CUPTI_ACTIVITY_KIND_KERNEL k "
            "ON k.correlationId = r.correlationId WHERE k.shortName > 0 ORDER BY r.start"
        ).fetchall()
        told = [(100, launches[0][1], payload(9, COMMUNICATOR_OF, place[1], place[0], place[0] % 2))]
        told += [
            (start - 50, thread, payload(7, communicators[at % len(communicators)], 4096))
            for at, (start, thread) in enumerate(launches)
        ]
        database.executemany(
            "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, NULL, ?, 3, ?)",
            [(start, start + 100, thread, data.hex() if as_text else data) for start, thread, data in told],
        )
    database.close()
