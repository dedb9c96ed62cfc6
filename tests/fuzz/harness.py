"""One input at a time, bounded in time and memory: what is neither taken nor refused with a documented error is a finding."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from fuzz.mutate import Mutator, of_bytes
from ncclwatch.errors import NcclwatchError

LIMIT_S = 1.0
"""CPU time that one input may take: the machine may be busy with something else, which is not the input's fault."""
LIMIT_BYTES = 256 << 20
FINDINGS = Path(__file__).parent / "findings"
_SETTLE_EVERY = 4096


@dataclass(frozen=True)
class Target:
    """One way in: ``run`` takes any bytes as what somebody hostile may say there, ``seeds`` are well-formed ones."""

    name: str
    what: str
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], object]
    mutate: Mutator = of_bytes
    max_len: int = 1 << 12
    quick: int = 150
    """Inputs of the quick pass in the unit tests."""


@dataclass(frozen=True)
class Finding:
    """An input that did harm: ``where`` is the innermost line of ours, by which findings are told apart."""

    target: str
    kind: str
    where: str
    data: bytes
    trace: str = field(repr=False, default="")

    @property
    def signature(self) -> tuple[str, str]:
        """What two findings of one defect have in common."""
        return self.kind, self.where

    @property
    def file_name(self) -> str:
        """The name it is kept under."""
        return f"{self.target}-{hashlib.sha256(self.data).hexdigest()[:10]}.bin"


class TooSlowError(BaseException):
    """The input has had its time. Not an ``Exception``: nothing on the way may take it for an ordinary failure."""


class Guard:
    """Runs inputs within the limits; a context manager, for it sets a signal's handler and the limit of the address space."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._count = 0
        self.slowest_s = 0.0

    def __enter__(self) -> Guard:
        self._limits = resource.getrlimit(resource.RLIMIT_AS)
        self._handler = signal.signal(signal.SIGPROF, self._tick)
        signal.setitimer(signal.ITIMER_PROF, 0.2, 0.2)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._handler)
        resource.setrlimit(resource.RLIMIT_AS, self._limits)

    def _tick(self, _number: int, _frame: FrameType | None) -> None:
        if self._began is not None and time.process_time() - self._began > LIMIT_S:
            self._began = None
            raise TooSlowError(f"more than {LIMIT_S:.0f} s of CPU")

    def _settle(self) -> None:
        """What the process holds by now is no input's fault; what one input may add is limited from here."""
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + LIMIT_BYTES, self._limits[1]))

    def check(self, target: Target, data: bytes) -> Finding | None:
        """Whether an input does harm."""
        if self._count % _SETTLE_EVERY == 0:
            self._settle()
        self._count += 1
        begin = self._began = time.process_time()
        try:
            target.run(data)
        except NcclwatchError:
            pass
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._began = None
            return Finding(target.name, type(error).__name__, _where(error), data, "".join(traceback.format_exception(error)))
        finally:
            self._began = None
            taken = time.process_time() - begin
            self.slowest_s = max(self.slowest_s, taken)
        if taken > LIMIT_S:
            return Finding(target.name, TooSlowError.__name__, "without a line of Python's", data)
        return None


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/ncclwatch/" in frame.filename] or list(frames)
    return f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "?"


def inputs(target: Target, count: int, seed: int) -> Iterator[bytes]:
    """Seeds, then mutations of them and of mutations, without guidance; the same for the same seed."""
    source = random.Random(f"{target.name} {seed}")
    seeds = target.seeds()
    former = list(seeds)
    yield from seeds[:count]
    for _ in range(count - len(seeds)):
        data = source.choice(seeds if source.random() < 0.7 else former)
        mutate = target.mutate if source.random() < 0.95 else of_bytes
        data = mutate(data, source)[: target.max_len]
        former[source.randrange(len(former))] = data
        yield data


def kept(target: str) -> list[Path]:
    """Findings of a target that were kept."""
    return sorted(FINDINGS.glob(f"{target}-*.bin"))


@contextlib.contextmanager
def scratch_file(data: bytes) -> Iterator[Path]:
    """A file in memory with these contents."""
    descriptor = os.memfd_create("fuzz", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, data)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
