"""All formats of other tools that are read, in the order in which a file is tried."""

from __future__ import annotations

from ncclwatch.ingest.base import Format
from ncclwatch.ingest.dcgm import Dcgm
from ncclwatch.ingest.flight_recorder import FlightRecorder
from ncclwatch.ingest.inspector import Inspector
from ncclwatch.ingest.kineto import Kineto
from ncclwatch.ingest.nccl_log import NcclLog
from ncclwatch.ingest.nsys import Nsys
from ncclwatch.ingest.rank_log import RankLogs
from ncclwatch.ingest.ras import Ras
from ncclwatch.ingest.straggler_analysis import StragglerAnalysis

FORMATS: tuple[Format, ...] = (
    Kineto(),
    Ras(),
    Inspector(),
    # Any other object of JSON may be a dump that was written as JSON.
    FlightRecorder(),
    RankLogs(),
    Nsys(),
    StragglerAnalysis(),
    Dcgm(),
    NcclLog(),
)
