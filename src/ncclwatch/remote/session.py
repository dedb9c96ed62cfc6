"""A session on the other side of a network: what an engine sends of a job, shown by the surfaces of ``attach``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ncclwatch.collect.batch import Overhead, PlaneState
from ncclwatch.collect.watched import Problem
from ncclwatch.collect.windows import RankWindow
from ncclwatch.engine.session import Update
from ncclwatch.messaging.keys import Key
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.transport import EngineUnreachableError, ViewerTransport
from ncclwatch.messaging.viewer import ZmqViewer
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.looks import ProcessLook
from ncclwatch.model.state import ProcessInfo, ProcessSample
from ncclwatch.model.verdict import Verdict
from ncclwatch.remote.iterations import Timed
from ncclwatch.remote.job_view import JobView, ViewReader
from ncclwatch.stopping import Stop

CONNECT_S = 10.0
FIRST_VIEW_S = 10.0
SILENT_S = 5.0


class RemoteSession:
    """Follows one job of an engine. ``transport``: another than ZeroMQ to ``address``."""

    def __init__(
        self,
        address: str,
        *,
        keys: tuple[Key, bytes] | None = None,
        token: str = "",
        stop: Stop | None = None,
        transport: ViewerTransport | None = None,
    ) -> None:
        self.address = address
        self.stop = stop or Stop()
        self.verdicts: Sequence[Verdict] = ()
        self.windows: Sequence[RankWindow] = ()
        self.samples: Mapping[ProcessKey, ProcessSample] = {}
        self.planes: Sequence[PlaneState] = ()
        self.problems: Sequence[Problem] = ()
        self.view: JobView | None = None
        self.iterations: Sequence[Timed] = ()
        self.roles: Mapping[int, str] = {}
        self.layout = ""
        self.seen_stacks: Sequence[ProcessLook] = ()
        self.lost = 0
        self._overhead: Overhead | None = None
        self._reader = ViewReader()
        self._notes: list[str] = []
        self._told_silence = False
        self._viewer: ViewerTransport = transport or ZmqViewer(address, keys=keys, token=token)

    # --- what surfaces ask ---------------------------------------------------------------------------------------------

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that stands, of the worst job."""
        return self.verdicts[0] if self.verdicts else None

    @property
    def infos(self) -> list[ProcessInfo]:
        """The processes that are watched."""
        return [window.process for window in self.windows]

    def overhead(self) -> Overhead | None:
        """What watching costs, on the node where it costs most."""
        return self._overhead

    @property
    def is_silent(self) -> bool:
        """Whether the engine has said nothing for so long that what is shown is old."""
        return time.monotonic() - self._viewer.heard > SILENT_S

    # --- beginning, steps, end -----------------------------------------------------------------------------------------

    def start(self, duration: float | None = None) -> None:
        """Connect and wait for the first view. Raises when no engine answers; a job nobody sends of yet is waited for."""
        began = time.monotonic()
        limit = began + CONNECT_S
        while not self._viewer.welcomed and not self.stop.is_set():
            if time.monotonic() > limit:
                raise EngineUnreachableError(
                    f"no engine answers at {self.address}",
                    "see that 'ncclwatch engine' runs there and has the same keys",
                )
            self._hear(0.1)
        patience = FIRST_VIEW_S if duration is None else min(duration, FIRST_VIEW_S)
        while self.view is None and not self.stop.is_set():
            self._hear(0.1)
            if time.monotonic() - began > patience:
                self._notes.append("the engine has heard no agent of this job yet")
                return

    def step(self, *, until: float | None = None) -> Update:
        """Wait for the next view, at most a moment."""
        left = 0.25 if until is None else max(0.0, min(0.25, until - time.monotonic()))
        update = self._hear(left) or Update(time.monotonic_ns())
        update.notes += self._notes
        self._notes = []
        silent = self.is_silent
        if silent and not self._told_silence:
            update.notes.append("the engine says nothing: what is shown is old")
        self._told_silence = silent
        if self.stop.is_set():
            update.finished = "interrupted"
        elif until is not None and time.monotonic() >= until:
            update.finished = "duration over"
        return update

    def close(self) -> None:
        """Leave."""
        self._viewer.close()

    def _hear(self, timeout_s: float) -> Update | None:
        payload = self._viewer.hear(timeout_s)
        self._notes += self._viewer.take_news()
        if payload is None:
            return None
        try:
            return self._show(payload)
        except FormatError as error:
            self._notes.append(f"the engine said something that makes no sense: {error.message}")
            return None

    def _show(self, payload: bytes) -> Update | None:
        found = self._reader.decode(payload)
        if found is None:
            return None
        self.view, batch, update = found
        self.verdicts, self.windows, self.lost = update.verdicts, batch.windows, update.lost
        self.samples = {sample.process.key: sample for sample in batch.samples}
        self.planes = batch.planes
        self.iterations, self.roles, self.layout = self.view.iterations, self.view.roles, self.view.layout
        self.seen_stacks = self.view.stacks
        self._overhead = batch.overhead or self._overhead
        return update
