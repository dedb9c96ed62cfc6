"""``ncclwatch diagnose --ras HOST:PORT``: a verdict by the RAS service of a running job, which nothing else here ever asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ncclwatch.cli.output import emit_json, note
from ncclwatch.cli.verdicts import print_verdicts
from ncclwatch.errors import ExitStatus

if TYPE_CHECKING:
    from ncclwatch.ingest.base import Ingested
    from ncclwatch.model.verdict import Verdict

RasOption = Annotated[
    str | None,
    typer.Option(
        "--ras",
        metavar="HOST:PORT",
        help="Ask the job's own RAS service (localhost:28028 on its nodes), twice, --wait seconds apart. Jobs have crashed when "
        "it was asked: the reports are printed first. No privileges are needed.",
    ),
]


def judge_ras(text: str, *, wait: float, as_json: bool, exit_code: bool, why: bool) -> int:
    """Ask, judge and print; returns the exit status. Raises NcclwatchError where nobody answers."""
    from ncclwatch.ingest.ras_client import KNOWN_CRASHES, parse_address
    from ncclwatch.ingest.ras_live import look

    address = parse_address(text)
    note("asking RAS has crashed jobs: " + "; ".join(KNOWN_CRASHES))
    jobs = look(address, wait)
    verdicts = [verdict for job in jobs for verdict in verdicts_of(job)]
    for job in jobs:
        for line in (*job.notes, *job.problems):
            note(line)
    if as_json:
        emit_json(verdicts[0].to_json() if verdicts else None)
    elif verdicts:
        print_verdicts(verdicts, why=why)
    return ExitStatus.VERDICT if exit_code and any(one.verdict_class.accuses for one in verdicts) else ExitStatus.OK


def verdicts_of(job: Ingested) -> Sequence[Verdict]:
    """What the engine says of looks at a job that are all there will ever be; nothing where they name no rank."""
    from ncclwatch.engine.case import Known
    from ncclwatch.engine.live import LiveDiagnosis
    from ncclwatch.engine.patience import Patience
    from ncclwatch.engine.session import DiagnosisSession

    session = DiagnosisSession(LiveDiagnosis(Known(Patience(0.0, adaptive=False))))
    for batch in job.batches:
        session.feed(batch)
        session.judge(batch.time_ns)
    told = map(job.amend, session.verdicts)
    return [replace(one, unobserved=tuple(dict.fromkeys((*one.unobserved, *job.blind)))) for one in told]
