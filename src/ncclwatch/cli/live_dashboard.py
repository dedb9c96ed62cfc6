"""``attach`` on a terminal: the session in a thread, the dashboard in front of it, and what stands when it is left."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ncclwatch.cli.live import LiveSession
from ncclwatch.cli.output import emit
from ncclwatch.cli.surfaces import Surface, watch
from ncclwatch.dashboard.live import LiveSource
from ncclwatch.errors import NcclwatchError
from ncclwatch.text import Style, clean, size, wrap
from ncclwatch.view.verdict_text import verdict_lines

if TYPE_CHECKING:
    from ncclwatch.cli.live import Session, Steps
    from ncclwatch.model.paths import Probe
    from ncclwatch.store.recorder import Recorder


class Recording:
    """The recording that a key begins and ends. It never ends the dashboard: what goes wrong is a word in its title."""

    def __init__(self, session: LiveSession) -> None:
        self._session = session
        self._recorder: Recorder | None = None

    def toggle(self) -> str:
        """Begin, or end, and say so."""
        from ncclwatch.store.recorder import Recorder

        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            self._session.taps.remove(recorder.put)
            status = recorder.close()
            lost = f", {status.dropped} batches NOT recorded" if status.dropped else ""
            return f"recorded {recorder.path} ({size(status.written)}{lost}): see it with 'ncclwatch replay {recorder.path}'"
        self._recorder = Recorder(Path(time.strftime("ncclwatch-%Y%m%d-%H%M%S.recording")), about={"command": "attach"})
        self._session.taps.append(self._recorder.put)
        return f"recording into {self._recorder.path}; R ends it"

    def state(self) -> str:
        """``REC`` while it goes on, with what is wrong."""
        if self._recorder is None:
            return ""
        return f"REC: {self._recorder.status.problem}" if self._recorder.status.problem else "REC"

    def close(self) -> None:
        """End it if it is going on."""
        if self._recorder is not None:
            self.toggle()


def show_dashboard(session: Steps, duration: float | None, also: Sequence[Surface] = (), probes: Sequence[Probe] = ()) -> None:
    """Show a started session until it ends or the user leaves; then say on the ordinary screen what stands."""
    from ncclwatch.dashboard.app import Dashboard

    recording = Recording(session) if isinstance(session, LiveSession) else None
    source = LiveSource(
        session.stop,
        save=(lambda: save_snapshot(session)) if recording else None,
        toggle_recording=recording.toggle if recording else None,
        recording_state=recording.state if recording else None,
    )
    source.run(lambda: watch(session, source, duration, also))
    try:
        reason = Dashboard(source, probes=probes).run()
    finally:
        source.join()
        if recording is not None:
            recording.close()
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

    pids = list(dict.fromkeys(info.pid for info in session.infos))
    if not pids:
        raise NcclwatchError("no process is left to save")
    path = Path(time.strftime("ncclwatch-%Y%m%d-%H%M%S.snapshot"))
    record_snapshot(pids, path, samples=2, interval=1.0)
    return f"saved {path} ({size(path.stat().st_size)}): read it with 'ncclwatch diagnose {path}'"
