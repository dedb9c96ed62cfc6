"""Made-up exports of Nsight Systems, by the schema that NVIDIA documents; tables are made lazily, as it does."""

from __future__ import annotations

import sqlite3
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
            database.execute("CREATE INDEX runtime_correlation ON CUPTI_ACTIVITY_KIND_RUNTIME (correlationId)")
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
