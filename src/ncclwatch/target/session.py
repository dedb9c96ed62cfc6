"""A target process held open: what commands and the agent use to look at one rank."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from ncclwatch.errors import NcclwatchError, TargetError, TargetGoneError
from ncclwatch.model.state import ProcessInfo, ProcessSample
from ncclwatch.target.cgroup import CpuLimits
from ncclwatch.target.commstate import CommState
from ncclwatch.target.communicators import SearchReport
from ncclwatch.target.decode import Decoder
from ncclwatch.target.devconn import CounterPlace, counter_places
from ncclwatch.target.discover import FoundProcess, each_library, examine, layout_of
from ncclwatch.target.layout import Layout
from ncclwatch.target.lineflags import blank
from ncclwatch.target.maps import Mapping
from ncclwatch.target.memory import LiveReader
from ncclwatch.target.process import GONE, context_switches, read_stat, run_queue_wait_ns
from ncclwatch.target.pulse import Pulse
from ncclwatch.target.recorded import RecordingReader
from ncclwatch.target.sampler import ProcessFacts, Sampler
from ncclwatch.target.traits import with_cpus_now

MAX_COUNTED_THREADS = 32
"""Context switches and waits for a CPU are one file a thread, and a sample must stay cheap: with more threads the former are left
out, the latter are read as much more rarely.
"""


class TargetProcess:
    """One process that carries NCCL, opened for reading. Never stops, signals or writes to it.

    ``info`` says which process it is (its rank may come from the largest communicator, then ``rank_source`` is
    ``"communicator"``), ``layout`` where NCCL's members lie in its build. Use as a context manager, or call ``close``.
    """

    def __init__(self, found: FoundProcess, layout: Layout, reader: LiveReader, *, recording: bool = False) -> None:
        self.info: ProcessInfo = found.info
        self.layout = layout
        self.load_bias: int | None = found.binary.bias
        self._others = tuple(binary.path for binary in found.others)
        self._reader = reader
        self._looks = 0
        self._cpus: set[int] = set()
        self._limits = CpuLimits(reader.pid)
        self._recorder = RecordingReader(reader) if recording else None
        self._pulse = Pulse(reader)
        self._sampler = Sampler(
            self._recorder or reader, layout, self.load_bias, library=(found.binary.base, found.binary.end), keep=not recording
        )

    @classmethod
    def open(cls, pid: int, *, recording: bool = False) -> TargetProcess:
        """Open a process, and prove that NCCL's memory in it can be read before reporting success.

        A process without communicators yet is fine: the proof then is one structure of the library itself. Raises
        :class:`TargetError` (no NCCL, unknown build, nothing sane could be read), :class:`TargetGoneError`,
        :class:`ncclwatch.errors.PrivilegeError`.
        """
        # The reader first: it pins the address space, so that an exec during the examination is noticed.
        reader = LiveReader(pid)
        try:
            return cls._open(examine(pid), reader, recording=recording)
        except BaseException:
            reader.close()
            raise

    @classmethod
    def _open(cls, found: FoundProcess, reader: LiveReader, *, recording: bool) -> TargetProcess:
        """By the first of its libraries that has communicators, else by the first that can be read."""
        first: TargetProcess | None = None
        problem: NcclwatchError | None = None
        for one in each_library(found):
            try:
                target = cls(one, layout_of(one), reader, recording=recording)
                target._prove(one)
            except TargetGoneError:
                raise
            except NcclwatchError as error:
                problem = problem or error
                continue
            if target.communicator_states:
                return target
            first = first or target
        if first is None:
            assert problem is not None  # noqa: S101 - there is a library, or examine() had raised
            raise problem
        return first

    @property
    def pid(self) -> int:
        """The pid in the agent's pid namespace."""
        return self.info.pid

    def fetch(self) -> None:
        """Read now what the next sample needs; see :meth:`ncclwatch.target.sampler.Sampler.fetch`."""
        self._sampler.fetch()

    def sample(self) -> ProcessSample:
        """Look at the process now, or decode what was fetched; raises :class:`TargetGoneError` once it exited or replaced itself,
        also in the middle.
        """
        facts = self._facts()
        if self._recorder is not None:
            self._recorder.start_sample()
        try:
            sample = self._sampler.sample(self.info, facts)
        except (NcclwatchError, MemoryError):
            raise
        except Exception:
            # Memory of another program under the old addresses makes no sense: say that the process is gone, if it is.
            self._reader.check()
            raise
        self.info = sample.process
        if self._others:
            text = f"{len(self._others)} more NCCL in the process, of which calls are seen: {', '.join(self._others[:2])}"
            sample = replace(sample, unavailable={**sample.unavailable, "communicators of other libraries": text})
        self._pulse.follow(self.decoder.counters)
        return sample

    def moved(self) -> bool:
        """Whether NCCL has moved since the last sample or pulse, by a few words of it; raises :class:`TargetGoneError`."""
        return self._pulse.moved()

    @property
    def communicator_states(self) -> tuple[CommState, ...]:
        """The communicators of the last sample with their connectors, for who follows those further."""
        return self._sampler.states

    def counter_places(self) -> tuple[CounterPlace, ...]:
        """Counters of the last sample's connections that lie in GPU memory: only the counter shim can read them."""
        return counter_places(self.decoder, self.communicator_states)

    @property
    def decoder(self) -> Decoder:
        """Typed reads of this process's structures."""
        return self._sampler.decoder

    def record(self) -> tuple[ProcessSample, dict[int, bytes], dict[int, str]]:
        """A sample with the pages it was read from (address → content) and the communicators found; needs ``recording=True``."""
        if self._recorder is None:
            raise ValueError("not opened for recording")
        sample = self.sample()
        return sample, blank(self._recorder.pages, self._sampler.decoder.lines), dict(self._sampler.finder.found)

    def hint_communicator(self, address: int) -> bool:
        """Take the address of a communicator that an API call showed; whether one is there (it may still be initialising)."""
        return self._sampler.expect({address: "hint"})

    def creation_begun(self) -> None:
        """An API call of the process has begun to make a communicator: it is looked for in the next samples."""
        self._sampler.creation_begun()

    def mappings(self) -> Sequence[Mapping]:
        """The memory map as last read."""
        return self._reader.mappings()

    def search(self, seconds: float = 5.0, *, everything: bool = False) -> bool:
        """Go on looking for communicators for at most ``seconds``.

        Ends early once there are as many as the process's proxies serve, unless ``everything`` asks for all memory. Whether
        there are any.
        """
        return self._sampler.search(seconds, everything=everything)

    @property
    def search_report(self) -> SearchReport:
        """What looking for communicators has cost so far."""
        return self._sampler.finder.report

    def close(self) -> None:
        """Let go of the process."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _facts(self) -> ProcessFacts:
        now, wall = time.monotonic_ns(), time.time_ns()
        try:
            stat = read_stat(self.pid)
        except TargetGoneError:
            raise TargetGoneError(f"process {self.pid} exited", "list the NCCL processes with 'ncclwatch ps'") from None
        if stat.start_time != self.info.key.start_time:
            raise TargetGoneError(f"pid {self.pid} is another process now", "list the NCCL processes with 'ncclwatch ps'")
        if stat.state in ("Z", GONE):
            raise TargetGoneError(f"process {self.pid} exited", "list the NCCL processes with 'ncclwatch ps'")
        switches = context_switches(self.pid) if stat.threads <= MAX_COUNTED_THREADS else None
        every = -(-stat.threads // MAX_COUNTED_THREADS)
        waited = run_queue_wait_ns(self.pid) if self._looks % every == 0 else None
        self._looks += 1
        limit = self._limits.read()
        self._see_cpus()
        return ProcessFacts(now, wall, stat.state, stat.cpu_time_ns, switches, stat.threads, waited, limit)

    def _see_cpus(self) -> None:
        """Whether the process was given other CPUs since the last look."""
        with contextlib.suppress(OSError):
            cpus = os.sched_getaffinity(self.pid)
            if cpus != self._cpus and self.info.traits is not None:
                self.info = replace(self.info, traits=with_cpus_now(self.info.traits, self.pid))
            self._cpus = cpus

    def _prove(self, found: FoundProcess) -> None:
        """One sane read: the library's first bytes are an ELF header, and if communicators are there one can be decoded."""
        if self._reader.read_many([(found.binary.base, 4)])[0] != b"\x7fELF":
            raise TargetError(
                f"the memory of process {self.pid} does not show its {found.binary.path}",
                "is it exiting? look again with 'ncclwatch ps'",
            )
        if self._sampler.search():
            self.sample()
        self._reader.check()
