"""Probes of several processes come and go together: a process that waits for another one's pays for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import pytest

from ncclwatch.errors import NcclwatchError
from ncclwatch.probes.bpf import Link
from ncclwatch.probes.instructions import CostClass
from ncclwatch.wire.kernel import Attachment, WireKernel
from ncclwatch.wire.plane import WatchedProcess, WirePlane
from ncclwatch.wire.sites import Site


class RecordedKernel:
    """Stands for :class:`WireKernel`: what was attached, call by call, and what is still in place."""

    def __init__(self, refuses: int = 0) -> None:
        self.refuses = refuses
        self.calls: list[str] = []
        self.in_place: set[tuple[int, str]] = set()

    def pause(self) -> None: ...

    def new_generation(self) -> int:
        return 1

    def ready_to_detach(self, number: int) -> None:
        self.calls.append(f"ready {number}")

    def attach(self, sites: Iterable[Site], *, counting: bool) -> list[Attachment]:
        found = list(sites)
        if any(site.pid == self.refuses and site.role == "poll_cq" for site in found):
            raise NcclwatchError("refused")
        self.calls.append(" ".join(f"{site.pid}:{site.role}" for site in found))
        self.in_place |= {(site.pid, site.role) for site in found}
        return [Attachment(site, cast("Link", None)) for site in found]

    def detach(self, attachments: Iterable[Attachment]) -> None:
        gone = {(attachment.site.pid, attachment.site.role) for attachment in attachments}
        self.calls.append(f"detach {len(gone)}")
        self.in_place -= gone


def plane_of(kernel: RecordedKernel) -> WirePlane:
    plane = WirePlane(cast("WireKernel", kernel))
    for pid in (1, 2):
        sites = [Site(pid, 2, offset, "program", False, role, "", "", CostClass.EMULATED) for offset, role in ROLES]
        plane.processes[pid] = WatchedProcess(pid, sites={(2, site.offset, site.program): site for site in sites})
    return plane


ROLES = ((3, "post_send"), (9, "poll_cq"))


@pytest.mark.parametrize(("paused", "order"), [(True, ["post_send", "poll_cq"]), (False, ["poll_cq", "post_send"])])
def test_probes_of_all_processes_come_and_go_together(paused: bool, order: list[str]) -> None:
    kernel = RecordedKernel()
    plane = plane_of(kernel)
    plane.attach(paused=paused)
    plane.detach()
    assert kernel.calls == ["ready 4", *(f"{pid}:{role}" for role in order for pid in (1, 2)), "detach 4"]
    assert not any(process.attached for process in plane.processes.values())


def test_of_a_process_that_is_refused_nothing_stays() -> None:
    kernel = RecordedKernel(refuses=1)
    plane = plane_of(kernel)
    plane.attach(paused=True)
    assert kernel.in_place == {(2, "post_send"), (2, "poll_cq")}
    assert (plane.processes[1].unavailable, plane.processes[2].unavailable) == ("refused", "")
