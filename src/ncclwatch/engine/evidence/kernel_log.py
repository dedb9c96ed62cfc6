"""What the kernels of the hosts have logged: Xids, NIC errors, processes that it killed for want of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ncclwatch.engine.evidence.base import Fact, FactKind, Source
from ncclwatch.model.network import KernelLogLine

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

NAME = "kernel log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged(Fact):
    """A line of the kernel log of ``host``. ``subject`` is that host and the process it names (``None``: none)."""

    host: str
    line: KernelLogLine


class KernelLog(Source):
    """The kernels' logs."""

    name = NAME
    plane = "nic"
    kinds = frozenset({FactKind.LOGGED})

    def facts(self, case: Case) -> Iterator[Logged]:
        """Every line that is remembered, by host, the oldest first."""
        for host, known in sorted(case.known.network.hosts.items()):
            for heard_ns, line in known.kernel:
                at = (line.wall_ns or heard_ns) / 1e9
                yield Logged(
                    kind=FactKind.LOGGED, subject=(host, line.pid), source=NAME, interval=(at, at), host=host,
                    line=line, describe=partial(_text, line),
                )  # fmt: skip


def _text(line: KernelLogLine) -> str:
    return f"kernel log of {line.origin}: {line.text}"
