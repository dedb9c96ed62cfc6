"""A running job by its RAS service: asked twice, so that what moves between the two answers is seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ncclwatch.ingest.base import Ingested
from ncclwatch.ingest.ras import parse_answer
from ncclwatch.ingest.ras_answer import RasAnswer
from ncclwatch.ingest.ras_client import Address, ask
from ncclwatch.ingest.ras_records import SECOND, jobs_of


def look(
    address: Address,
    apart_s: float,
    *,
    asked: Callable[[Address], bytes] = ask,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Sequence[Ingested]:
    """The jobs that a RAS service tells of, from two answers at least ``apart_s`` seconds apart. Raises as :func:`ask`."""
    answers: list[RasAnswer] = []
    moments: list[int] = []
    for _ in range(2):
        if moments:
            sleep(max(0.0, apart_s - (clock() - moments[-1] / SECOND)))
        moments.append(round(clock() * SECOND))
        answers.append(parse_answer(asked(address), f"{address.host}:{address.port}", time.time()))
    return jobs_of(answers, apart_ns=moments)
