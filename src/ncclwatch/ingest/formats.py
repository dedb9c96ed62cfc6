"""All formats of other tools that are read, in the order in which a file is tried."""

from __future__ import annotations

from ncclwatch.ingest.base import Format
from ncclwatch.ingest.flight_recorder import FlightRecorder
from ncclwatch.ingest.inspector import Inspector
from ncclwatch.ingest.nccl_log import NcclLog
from ncclwatch.ingest.ras import Ras

FORMATS: tuple[Format, ...] = (
    FlightRecorder(),
    Ras(),
    Inspector(),
    NcclLog(),
)
