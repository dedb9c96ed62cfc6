"""The wire plane's programs in the kernel: loaded on demand, attached to one process at a time, their maps read in bulk."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ncclwatch.errors import NcclwatchError
from ncclwatch.probes.bpf import Link, attach_uprobe, attach_uprobe_multi, raise_memlock_limit, refusal
from ncclwatch.probes.program import Compilation, Image, Kernel
from ncclwatch.probes.ring import RingReader
from ncclwatch.wire import layouts
from ncclwatch.wire.own_functions import calibration_sites, own_function, own_functions
from ncclwatch.wire.sites import POLLING, Site

SOURCE = "verbs.bpf.c"
RING_BYTES = 1 << 16
"""Control events are rare and 56 bytes long: room for a thousand."""
MAX_CLOSERS = 64
"""Links that are closed side by side: those of sixteen ranks."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A probe that is in place; it lives until :meth:`WireKernel.detach`."""

    site: Site
    link: Link


def hurry(nice: int = -20) -> None:
    """Let this thread run before others where that is allowed: while it waits for its turn, probes are in place."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def _heat(site: Site) -> tuple[bool, bool]:
    """Orders sites by how often they are hit; a return comes before the entry it belongs to, which alone would count for
    nothing."""
    return site.role in POLLING, not site.on_return


class WireKernel:
    """The maps and programs of ``verbs.bpf.c``.

    Making one waits for the compiler, unless an image that was compiled before is given. Raises :class:`CompileError`,
    :class:`PrivilegeError` or :class:`BpfError`.
    """

    def __init__(self, image: Image | None = None) -> None:
        raise_memlock_limit()
        program = image or Compilation(SOURCE).result()
        self._programs: dict[tuple[str, int | None], int] = {}
        self._ring: RingReader | None = None
        self._generation = 0
        self.multi = True
        self._closers: ThreadPoolExecutor | None = None
        self._ready = 0
        self._kernel = Kernel(program, ring_bytes=RING_BYTES)
        try:
            if not self._multi_works():
                # Begin anew: an array of programs belongs to the kind of attachment that used it first.
                self._kernel.close()
                self._programs.clear()
                self.multi = False
                self._kernel = Kernel(program, ring_bytes=RING_BYTES)
                self._set_steps()
            self.new_generation()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release everything; probes that were not detached go with the process."""
        if self._closers is not None:
            self._closers.shutdown()
            self._closers = None
            self._ready = 0
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._kernel.close()

    def __enter__(self) -> WireKernel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def attach(self, sites: Iterable[Site], *, counting: bool = False) -> list[Attachment]:
        """Put probes in place, for the process of each site alone; those on polling last, because they are hit without pause.

        ``counting``: accounts do not stand still meanwhile (:meth:`pause`). Then those on polling come first: a request that was
        seen to be posted, and its completion not, would wait for ever, and no completion of a later one would find it.

        When one is refused, those already in place are taken away again and the error is raised.
        """
        done: list[Attachment] = []
        ordered = sorted(sites, key=_heat)
        if counting:
            ordered.sort(key=lambda site: site.role not in POLLING)
        self.ready_to_detach(len(ordered))
        try:
            for site in ordered:
                done.append(Attachment(site, self._attach_one(site)))  # noqa: PERF401 - what is done is undone below
        except NcclwatchError:
            self.detach(done)
            raise
        return done

    def attach_control(self, path: str, offset: int, program: str) -> Link:
        """Probe a function of libibverbs in every process: these calls are rare."""
        if not self.multi:
            return attach_uprobe(self._program(program), path, offset)
        try:
            return attach_uprobe_multi(self._program(program), path, [(offset, 0)])
        except OSError as error:
            raise refusal(f"place a uprobe in {path}", error) from None

    def detach(self, attachments: Iterable[Attachment]) -> None:
        """Take probes away: from now on they cost nothing. Those on polling go first.

        The kernel removes a breakpoint at once and then waits, some 100 ms, for readers of its lists. Links of uprobe_multi are
        closed side by side; perf events take turns at a lock in the kernel, so there the order is all there is.
        """
        hottest_first = sorted(attachments, key=lambda attachment: _heat(attachment.site), reverse=True)
        closers = self.ready_to_detach(len(hottest_first))
        if closers is not None:
            list(closers.map(lambda attachment: attachment.link.close(), hottest_first))
            return
        for attachment in hottest_first:
            attachment.link.close()

    def ready_to_detach(self, number: int) -> ThreadPoolExecutor | None:
        """Threads that wait to close so many links, where links are closed side by side: while one is started, probes cost."""
        if not self.multi or not number:
            return None
        if self._closers is None:
            self._closers = ThreadPoolExecutor(max_workers=MAX_CLOSERS, initializer=hurry)
        if number > self._ready:
            self._ready = min(number, MAX_CLOSERS)
            together = threading.Barrier(self._ready)
            list(self._closers.map(lambda _: together.wait(10), range(self._ready)))
        return self._closers

    def _attach_one(self, site: Site) -> Link:
        program = self._program(site.program, site.places)
        if not self.multi:
            return attach_uprobe(program, site.path, site.offset, pid=site.pid, on_return=site.on_return)
        try:
            return attach_uprobe_multi(program, site.path, [(site.offset, 0)], pid=site.pid, on_return=site.on_return)
        except OSError as error:
            raise refusal(f"place a uprobe in {site.library}", error) from None

    def _multi_works(self) -> bool:
        """Whether uprobe_multi links can be had for one process, all of its threads, returns and tail calls included.

        They come and go without a lock in between, but exist from 6.6 on only, and at first took "process" for "thread": so it is
        tried out, on a function of our own called from another thread.
        """
        address, function = own_functions()[0], own_function(0)
        links: list[Link] = []
        try:
            self._set_steps()
            links = [self._attach_one(site) for site in calibration_sites(address)]
            with ThreadPoolExecutor(max_workers=1) as other_thread:
                thread = other_thread.submit(lambda: (function(0, 0, 0, 0), threading.get_native_id())[1]).result()
        except (NcclwatchError, OSError):
            return False
        finally:
            for link in links:
                link.close()
        record = self.threads().get((os.getpid(), thread))
        return record is not None and int(record["polls"]) == 2

    def _set_steps(self) -> None:
        """Name the program that takes a poll's completions one after the other."""
        self._kernel.maps["steps"].update(b"\0\0\0\0", self._program("on_completion").to_bytes(4, "little"))

    def _program(self, name: str, places: int | None = None) -> int:
        if (name, places) not in self._programs:
            self._programs[name, places] = self._kernel.load(name, multi=self.multi, site=places)
        return self._programs[name, places]

    def new_generation(self) -> int:
        """Begin to count: what is in flight now is unknown, so rings start empty; returns the number of the generation."""
        self._generation += 1
        self._configure(paused=False)
        return self._generation

    def pause(self) -> None:
        """Let the accounts stand still until the next generation, whatever probes are hit; hits are tallied all the same."""
        self._configure(paused=True)

    def resume(self) -> None:
        """Count again, in the same generation."""
        self._configure(paused=False)

    def _configure(self, *, paused: bool) -> None:
        value = np.zeros(1, dtype=layouts.CONFIG)
        value["generation"], value["paused"] = self._generation, paused
        self._kernel.maps["config"].update(b"\0\0\0\0", value.tobytes())

    def queue_pairs(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """(keys, accounts) of all queue pairs seen so far, of dtypes ``layouts.QP_KEY`` and ``layouts.QP``."""
        table = self._kernel.maps["qps"]
        keys, values = [], []
        for key in dict.fromkeys(table.keys()):
            value = table.lookup(key)
            if value is not None:
                keys.append(key)
                values.append(value)
        return np.frombuffer(b"".join(keys), layouts.QP_KEY), np.frombuffer(b"".join(values), layouts.QP)

    def forget(self, keys: npt.NDArray[Any]) -> None:
        """Drop the accounts of queue pairs that are gone."""
        for key in keys:
            self._kernel.maps["qps"].delete(key.tobytes())
            self._kernel.maps["numbers"].delete((int(key["pid"]) << 32 | int(key["qp_num"])).to_bytes(8, "little"))

    def threads(self) -> dict[tuple[int, int], Any]:
        """(pid, tid) → hits of its probes (a record of ``layouts.THREAD``)."""
        table = self._kernel.maps["threads"]
        found = {}
        for key in table.keys():  # noqa: SIM118 - a BPF map, not a dict
            value = table.lookup(key)
            if value is not None:
                number = int.from_bytes(key, "little")
                found[number >> 32, number & 0xFFFFFFFF] = np.frombuffer(value, layouts.THREAD)[0]
        return found

    def counters(self) -> dict[str, int]:
        """What the programs could not account for, by name (``layouts.COUNTERS``), since the beginning."""
        table = self._kernel.maps["counters"]
        result = {}
        for index, name in enumerate(layouts.COUNTERS):
            value = table.lookup(index.to_bytes(4, "little"))
            result[name] = int(np.frombuffer(value, "<u8").sum()) if value is not None else 0
        return result

    def control_events(self, timeout_s: float = 0.0) -> npt.NDArray[Any]:
        """What happened on the control path since the last call (``layouts.CONTROL``); waits at most ``timeout_s`` for
        something."""
        if self._ring is None:
            self._ring = RingReader(self._kernel.maps["control"].fd, RING_BYTES, layouts.CONTROL)
        if timeout_s > 0:
            with contextlib.suppress(InterruptedError):
                self._ring.wait(timeout_s)
        return self._ring.read()
