"""The calls plane as a live session uses it: one that cannot run says why, and everything else goes on without it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ncclwatch.collect.replays import Replays
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.state import ProcessInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ncclwatch.probes.program import Compilation
    from ncclwatch.probes.tracer import CallTracer, TracedFile


class CallsPlane:
    """Probes on NCCL's calls, or the reason why there are none."""

    def __init__(self, *, every: bool) -> None:
        self._every = every
        self._tracer: CallTracer | None = None
        self._compilation: Compilation | None = None
        self._files: set[tuple[int, int]] = set()
        self._replays = Replays()
        self._lost = 0
        self._hits = (0, 0, time.monotonic())
        self.reason = "switched off"
        """Why no calls are seen; empty while they are."""
        self.problems: list[str] = []
        """Files that could not be probed, in words; the caller takes them out."""

    @property
    def running(self) -> bool:
        """Whether call records arrive."""
        return self._tracer is not None

    def prepare(self) -> None:
        """Begin to compile the BPF program in a process of its own, while the caller reads memory."""
        from ncclwatch.probes.program import Compilation
        from ncclwatch.probes.support import check_support

        try:
            check_support()
            self._compilation = Compilation()
        except (NcclwatchError, OSError) as error:
            self.reason = str(error)

    @property
    def compiles(self) -> bool:
        """Whether programs are being compiled, which takes a second of CPU time."""
        return self._compilation is not None and self._compilation.running

    def start(self, infos: Iterable[ProcessInfo]) -> None:
        """Attach to the libraries of these processes. A failure is kept as ``reason``."""
        if self._compilation is None:
            return
        from ncclwatch.probes.tracer import CallTracer

        infos = list(infos)
        try:
            files = [file for info in infos for file in self._traced_files(info)]
            watch = None if self._every else [info.pid for info in infos]
            self._tracer = CallTracer.start(files, watch=watch, compilation=self._compilation)
        except (NcclwatchError, OSError) as error:
            self._compilation.cancel()
            self.reason = str(error)
            return
        self.reason = ""
        if self._every:
            for info in infos:
                self.add_process(info)

    def add_process(self, info: ProcessInfo) -> None:
        """Watch one more process, and its library if it is another one."""
        if self._tracer is None:
            return
        try:
            for file in self._traced_files(info):
                self._tracer.add_file(file)
            self._tracer.add_process(info.pid)
        except (NcclwatchError, OSError) as error:
            self.problems = [*self.problems[-9:], f"calls of pid {info.pid} are not seen: {error}"]

    def remove_process(self, info: ProcessInfo) -> None:
        """Watch a process no longer."""
        if self._tracer is not None:
            self._tracer.remove_process(info.pid)

    @property
    def filled(self) -> float:
        """How full the ring of records is, from 0 to 1."""
        return self._tracer.filled if self._tracer is not None else 0.0

    def poll(self) -> NDArray[Any] | None:
        """Records since the last time, without waiting, with captured calls where graphs replay them; a damaged ring ends the
        plane.
        """
        if self._tracer is None:
            return None
        try:
            return self._replays.expand(self._tracer.poll(0.0))
        except NcclwatchError as error:
            self.stop()
            self.reason = str(error)
            self.problems.append(f"calls are seen no longer: {error}")
            return None

    def lost(self) -> int:
        """Records lost since the start."""
        lost = sum(self._tracer.losses()) if self._tracer is not None else 0
        if lost > self._lost:
            self._lost = lost
            self._replays.forget()
        return lost

    def cost(self) -> tuple[float | None, float | None]:
        """(probe hits a second, their estimated time as a share of one core) since this was last asked."""
        if self._tracer is None:
            return None, None
        found = self._tracer.hits()
        hits, cost_ns, now = sum(site.hits for site in found), sum(site.cost_ns for site in found), time.monotonic()
        before_hits, before_ns, before = self._hits
        self._hits = (hits, cost_ns, now)
        elapsed = max(now - before, 1e-3)
        return max(hits - before_hits, 0) / elapsed, max(cost_ns - before_ns, 0) / 1e9 / elapsed

    def stop(self) -> None:
        """Detach every probe."""
        if self._tracer is not None:
            self._tracer.stop()
            self._tracer = None
        if self._compilation is not None:
            self._compilation.cancel()
            self._compilation = None

    def _traced_files(self, info: ProcessInfo) -> list[TracedFile]:
        """The files of a process that carry NCCL, and the one that launches its graphs, that are not attached yet."""
        from ncclwatch.probes.graph_library import graph_library
        from ncclwatch.probes.tracer import CommunicatorOffsets, TracedFile
        from ncclwatch.target.discover import examine, layout_of

        found = examine(info.pid)
        files = []
        for binary in (found.binary, *found.others):
            identity = (binary.dev, binary.inode)
            if identity in self._files:
                continue
            self._files.add(identity)
            try:
                offsets = CommunicatorOffsets.from_layout(layout_of(found)) if binary is found.binary else CommunicatorOffsets()
            except NcclwatchError:
                # Calls are seen all the same; only communicator, rank and counter are not read with them.
                offsets = CommunicatorOffsets()
            files.append(TracedFile(binary.open_path, offsets))
        try:
            launches = graph_library(info.pid)
        except NcclwatchError as error:
            launches = None
            self.problems = [*self.problems[-9:], f"CUDA graphs of pid {info.pid} are not seen: {error}"]
        if launches is not None and launches[1] not in self._files:
            self._files.add(launches[1])
            # First: a call that is captured must not be taken for one that is made.
            files.insert(0, TracedFile(launches[0]))
        return files
