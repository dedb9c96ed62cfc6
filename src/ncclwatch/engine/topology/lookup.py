"""Whose call a record is: process and row of a job map, vectorised over a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.jobmap import JobMap
from ncclwatch.model.events import Flag


class Lookup:
    """(pid, communicator) of call records → process and row, vectorised."""

    def __init__(self, jobmap: JobMap | None = None) -> None:
        self._map = jobmap
        rows = list(jobmap.rows.items()) if jobmap is not None else []
        keys = np.array([process for (process, _), _ in rows], np.uint64), np.array([a for (_, a), _ in rows], np.uint64)
        hashed = _hash(*keys)
        order = np.argsort(hashed)
        self._keys, self._rows = hashed[order], np.array([row for _, row in rows], np.int64)[order]

    def find(self, events: NDArray[Any], host: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Process and row of each record, −1 where unknown."""
        if self._map is None:
            nothing = np.full(len(events), -1, np.int64)
            return nothing, nothing
        pids, inverse = np.unique(events["pid"], return_inverse=True)
        process = np.array([self._map.find(host, pid) for pid in pids.tolist()], np.int64)[inverse]
        row = np.full(len(events), -1, np.int64)
        if len(self._keys):
            wanted = _hash(process.astype(np.uint64), events["comm"].astype(np.uint64))
            place = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
            hit = (self._keys[place] == wanted) & (process >= 0) & ((events["flags"] & np.uint16(Flag.COMM_READ)) != 0)
            row[hit] = self._rows[place[hit]]
        return process, row


def _hash(process: NDArray[np.uint64], address: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        mixed: NDArray[np.uint64] = (address ^ (process * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
    return mixed
