"""The guest's boots of one pytest run on the host: all tests marked ``vm`` in one, and the reports that come out of it.

SoftRoCE of Linux 6.1 now and then leaves a processor spinning in the kernel when a port goes down (seen as "soft lockup" in
``ib_write_bw``). The guest's kernel is told to give up then (see ``guest.KERNEL_OPTIONS``); what had not come to its end is run
in another boot, and the run's summary says so. A test whose own run takes the kernel down twice has failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from ncclwatch.probes.program import Compilation, CompileError
from ncclwatch.probes.site_cache import sites_of
from ncclwatch.target.elf import ElfFile
from ncclwatch.target.resolve import resolve_layout
from ncclwatch.wire.kernel import SOURCE as WIRE_PROGRAM
from testbed.job import VERSIONS, available, build, library
from vm.errors import GuestError
from vm.guest import FULL_VARIABLE, Guest

BOOT_TIMEOUT_S = 1200.0
"""For one boot: every test, power off. It takes seven minutes on an idle machine; emulation suffers from every neighbour."""

FULL_TIMEOUT_S = 5400.0
"""The same with every release of NCCL, every kind of hang and the training job: half an hour on an idle machine."""

REPORTS = "reports.jsonl"

LOSSES = 2
"""So often is a test running when the guest's kernel gives up until it has failed: once is an accident."""

BOOTS = 3
"""In all, for one run."""


def boot_timeout_s() -> float:
    """Seconds for one boot."""
    return FULL_TIMEOUT_S if os.environ.get(FULL_VARIABLE) else BOOT_TIMEOUT_S


def layer_timeout_s() -> float:
    """Seconds after which nobody waits for the guest any more, all boots together."""
    return BOOTS * boot_timeout_s()


class Boot(Protocol):
    """What the layer needs of a guest; see :class:`vm.guest.Guest`."""

    share: Path

    @property
    def running(self) -> bool: ...

    @property
    def status(self) -> int | None: ...

    def tail(self) -> str: ...

    def last_words(self) -> str: ...

    def close(self) -> None: ...


class Layer:
    """Every test's reports, from as many boots as it takes. ``boot`` starts a guest that runs the tests of these node ids."""

    def __init__(self, config: pytest.Config, nodes: Sequence[str], boot: Callable[[Sequence[str]], Boot]) -> None:
        self._config = config
        self._left = list(nodes)
        self._boot = boot
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._losses: Counter[str] = Counter()
        self._failed: dict[str, str] = {}
        self.notes: list[str] = []
        """A line for each time the guest's kernel gave up."""
        self._start()

    def close(self) -> None:
        self._guest.close()

    def wait_for(self, node: str) -> list[pytest.TestReport]:
        """The reports of setup, call and teardown of one test; raises GuestError if they never come."""
        while True:
            running = self._guest.running
            self._read()
            if self._is_done(node):
                return self._reports[node]
            if node in self._failed:
                raise GuestError(self._failed[node])
            if not running:
                self._boot_again()
            elif time.monotonic() > self._deadline:
                raise GuestError(f"the guest's {boot_timeout_s():.0f} s are over; its console ends with:\n{self._guest.tail()}")
            else:
                time.sleep(0.1)

    def _start(self) -> None:
        self._offset = 0
        self._deadline = time.monotonic() + boot_timeout_s()
        self._guest = self._boot(self._left)

    def _boot_again(self) -> None:
        """For what is left, after a kernel that gave up. Raises GuestError where it was something else, or happened too often."""
        ends = f"its console ends with:\n{self._guest.tail()}"
        if self._guest.status is not None:
            raise GuestError(f"the guest ended without running this test; {ends}")
        if len(self.notes) + 1 >= BOOTS:
            raise GuestError(f"the guest's kernel gave up in each of {BOOTS} boots; {ends}")
        self._left = [node for node in self._left if not self._is_done(node)]
        during = self._left[0]
        said = f"the guest's kernel gave up during {during}: {self._guest.last_words()}"
        self.notes.append(said)
        self._losses[during] += 1
        if self._losses[during] >= LOSSES:
            self._failed[during] = f"{said}, {LOSSES} times; {ends}"
            self._left.remove(during)
        for node in self._left:
            self._reports.pop(node, None)
        if self._left:
            self.close()
            self._start()

    def _is_done(self, node: str) -> bool:
        reports = self._reports.get(node, [])
        return bool(reports) and reports[-1].when == "teardown"

    def _read(self) -> None:
        path = self._guest.share / REPORTS
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=json.loads(line))
            if isinstance(report.longrepr, list):  # JSON has no tuples, and pytest insists on one for a skip
                report.longrepr = tuple(report.longrepr)
            self._reports.setdefault(report.nodeid, []).append(report)


def study(version: str) -> None:
    """Have in the user's cache what can be found out of a release's library: the guest sees it as well, where it is root's."""
    with ElfFile.open(library(version)) as elf:
        resolve_layout(elf)
        sites_of(elf)


class PytestGuest(Guest):
    """A guest that runs pytest on some tests, with what they need built and compiled by the host."""

    def __init__(self, config: pytest.Config, nodes: Sequence[str]) -> None:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=long", "--color=no"]
        with contextlib.suppress(CompileError):  # it is a test's to say so
            Compilation(WIRE_PROGRAM).result()
        for version in VERSIONS:  # inside, a compiler takes minutes
            if available(version):
                build(version)
                study(version)
        super().__init__(
            [*command, *nodes],
            cwd=config.rootpath,
            environment={name: os.environ[name] for name in (FULL_VARIABLE, "PYTHONPATH") if name in os.environ},
        )
        self.__enter__()

    def close(self) -> None:
        """End the emulator if it still runs."""
        self.__exit__()
