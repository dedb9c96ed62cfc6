"""Rates of flows of this host's processes, looked at again and again, for ``paths follow`` to compare before and after a plan."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ncclwatch.collect.flows import FlowCollector
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.paths import NodeView
from ncclwatch.paths.flow_map import flow_map, measured_flows
from ncclwatch.target.discover import find_processes
from ncclwatch.target.namespaces import namespace_id
from ncclwatch.target.session import TargetProcess

if TYPE_CHECKING:
    from ncclwatch.paths.measured import MeasuredFlow

SURVEY_S = 2.0
"""How often processes are looked for: a job that is started anew has others."""


class Rates:
    """The named processes, or every NCCL process whose addresses are this one's: those of its network namespace."""

    def __init__(self, pids: Sequence[int], *, every: bool) -> None:
        self._named = () if every else tuple(pids)
        self._pids: frozenset[int] = frozenset()
        self._targets: list[TargetProcess] = []
        self._collector: FlowCollector | None = None
        self._survey_at = 0.0

    def close(self) -> None:
        """Let go of all processes."""
        if self._collector is not None:
            self._collector.close()
        for target in self._targets:
            target.close()
        self._collector, self._targets, self._pids = None, [], frozenset()

    def look(self) -> list[MeasuredFlow]:
        """What the flows of these processes do now; nothing while there are none."""
        now = time.monotonic()
        if now >= self._survey_at:
            self._survey_at = now + SURVEY_S
            self._survey()
        if self._collector is None:
            return []
        self._collector.step()
        return measured_flows(flow_map([NodeView(socket.gethostname(), self._collector.flows())]))

    def _survey(self) -> None:
        found = self._named or (one.pid for one in find_processes() if _is_near(one.pid))
        pids = frozenset(found)
        if pids == self._pids and (self._collector is None or self._collector.alive):
            return
        self.close()
        self._pids = pids
        for pid in sorted(pids):
            # A process that has ended, or is none of ours to read, has no rates.
            with suppress(NcclwatchError):
                self._targets.append(TargetProcess.open(pid))
        if self._targets:
            self._collector = FlowCollector(self._targets)


def _is_near(pid: int) -> bool:
    return namespace_id(pid, "net") == namespace_id(os.getpid(), "net")
