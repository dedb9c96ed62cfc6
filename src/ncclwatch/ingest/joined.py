"""Formats of one job that know of different ranks, as one record: before anything is judged."""

from __future__ import annotations

from collections.abc import Sequence

from ncclwatch.ingest.flight_recorder import ingested_of
from ncclwatch.ingest.flight_recorder_job import FlightJob
from ncclwatch.ingest.flight_recorder_logs import with_logs
from ncclwatch.ingest.folders import Record
from ncclwatch.ingest.rank_log_groups import LoggedRanks


def completed(records: Sequence[Record]) -> list[Record]:
    """Records in which Flight Recorder dumps of a job have the ranks that wrote none from their rank logs, where there is one job
    of each.
    """
    dumps = [(record, source) for record in records if isinstance(source := record.ingested.source, FlightJob)]
    logs = [source for record in records if isinstance(source := record.ingested.source, LoggedRanks)]
    if len(dumps) != 1 or len(logs) != 1:
        return list(records)
    [(one, dumped)], [logged] = dumps, logs
    job, lines = with_logs(dumped, logged)
    if not lines:
        return list(records)
    made = Record(one.format, ingested_of(job, one.ingested.job, one.ingested.problems, lines))
    return [made if record is one else record for record in records]
