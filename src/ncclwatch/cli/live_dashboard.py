"""``attach`` on a terminal: the session in a thread, the dashboard in front of it, and what stands when it is left."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ncclwatch.cli.attach import watch
from ncclwatch.cli.output import emit
from ncclwatch.dashboard.live import LiveSource
from ncclwatch.errors import NcclwatchError
from ncclwatch.report.verdict_text import verdict_lines
from ncclwatch.text import Style, clean, size, wrap

if TYPE_CHECKING:
    from ncclwatch.cli.live import Session, Steps


def show_dashboard(session: Steps, duration: float | None) -> None:
    """Show a started session until it ends or the user leaves; then say on the ordinary screen what stands."""
    from ncclwatch.dashboard.app import Dashboard

    source = LiveSource(session.stop, save=lambda: save_snapshot(session))
    source.run(lambda: watch(session, source, duration))
    try:
        reason = Dashboard(source).run()
    finally:
        source.join()
    if source.error is not None:
        raise source.error
    last_words(session, source.finished or reason or "ended")


def last_words(session: Session, reason: str) -> None:
    """Why it ended, and the verdicts that stand, where they can be read and copied."""
    standing = [verdict for verdict in session.verdicts if verdict.verdict_class.accuses]
    emit(f"ncclwatch: {clean(reason, 200)}" + ("" if standing else "; no verdict stands"))
    style, cells = Style(), shutil.get_terminal_size().columns
    for verdict in standing:
        for line in verdict_lines(verdict, style):
            emit("\n".join(wrap(line, cells)))


def save_snapshot(session: Session) -> str:
    """Write a snapshot file of the watched processes into the current folder."""
    from ncclwatch.target.image import record_snapshot

    pids = [info.pid for info in session.infos]
    if not pids:
        raise NcclwatchError("no process is left to save")
    path = Path(time.strftime("ncclwatch-%Y%m%d-%H%M%S.snapshot"))
    record_snapshot(pids, path, samples=2, interval=1.0)
    return f"saved {path} ({size(path.stat().st_size)}): read it with 'ncclwatch diagnose {path}'"
