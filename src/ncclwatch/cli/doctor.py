"""``ncclwatch doctor``: what works on this machine and for this job, and what to do about each gap.

Exit status: 0 when everything that 'attach' needs is there, 4 when something it needs is missing, 3 when a process given by
``--pid`` cannot be used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ncclwatch.cli import options
from ncclwatch.cli.findings import Finding, Level
from ncclwatch.cli.options import JsonOption, PidOption
from ncclwatch.cli.output import emit, emit_json
from ncclwatch.errors import ExitStatus
from ncclwatch.text import Style, clean

SCHEMA_NAME = "ncclwatch.doctor/1"


def doctor(pid: PidOption = None, as_json: JsonOption = False) -> int:
    """Check kernel, privileges, BCC, every libnccl and every probe site; says what to do about each gap."""
    from ncclwatch.cli.host_checks import host_findings
    from ncclwatch.cli.process_checks import process_findings

    named = options.pids(pid)
    host = list(host_findings())
    processes = list(process_findings(named))
    status = _status(host, processes)
    if as_json:
        emit_json({"schema": SCHEMA_NAME, "status": int(status), "host": host, "processes": processes})
        return status
    style = Style()
    emit(style.bold("this machine"))
    _print(host, style)
    emit()
    emit(style.bold("NCCL processes"))
    _print(processes, style)
    emit()
    emit(_summary([*host, *processes], style))
    return status


def _status(host: Iterable[Finding], processes: Iterable[Finding]) -> ExitStatus:
    if any(finding.level is Level.MISSING for finding in processes):
        return ExitStatus.TARGET
    return ExitStatus.PRIVILEGE if any(finding.level is Level.MISSING for finding in host) else ExitStatus.OK


def _print(findings: Sequence[Finding], style: Style) -> None:
    names = min(max((len(finding.name) for finding in findings), default=0), 30)
    paint = {Level.OK: style.good, Level.INFO: style.dim, Level.GAP: style.warn, Level.MISSING: style.bad}
    for finding in findings:
        emit(f"  {paint[finding.level](f'{finding.level:<8}')} {clean(finding.name, 40):<{names}} {clean(finding.detail, 300)}")
        if finding.hint:
            emit(f"  {'':<8} {'':<{names}} {style.bold('do:')} {clean(finding.hint, 300)}")


def _summary(findings: Iterable[Finding], style: Style) -> str:
    counted = Counter(finding.level for finding in findings)
    missing, gaps = counted[Level.MISSING], counted[Level.GAP]
    if missing:
        return style.bad(f"{missing} missing") + f", {gaps} gap{'s' if gaps != 1 else ''}: see what to do above"
    if gaps:
        return style.warn(f"{gaps} gap{'s' if gaps != 1 else ''}") + ": what can be mended is said above; the rest works"
    return style.good("all is well")
