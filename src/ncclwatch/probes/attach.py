"""Attach the programs to the sites of a file: by one uprobe_multi link, or by a perf event for each site on kernels before 6.6.

With links, one program serves all sites and the kernel hands it the site's number as a cookie; a link of many sites goes on and
off in one step. With perf events the number is written into a copy of the program for each site. Either way the file is named by
an open descriptor, so that it is the very inode that was examined, in whatever mount namespace it lives.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

from ncclwatch.probes.bpf import BpfError, Link, ProgramType, attach_raw_tracepoint, attach_uprobe, attach_uprobe_multi, refusal
from ncclwatch.probes.map_layouts import SiteKind
from ncclwatch.probes.program import Kernel
from ncclwatch.probes.sites import ProbeSite

_PROGRAMS = {SiteKind.ENTER: "enter", SiteKind.LEAVE: "leave"}


class Backend(StrEnum):
    """How uprobes are placed."""

    MULTI = "uprobe_multi"
    PERF = "perf"


class Attacher:
    """Places the programs of one :class:`Kernel`; chooses the backend at the first file unless it is given."""

    def __init__(self, kernel: Kernel, backend: Backend | None = None) -> None:
        self._kernel = kernel
        self.backend = backend
        self._multi: dict[SiteKind, int] = {}

    def attach(self, fd: int, sites: Sequence[tuple[int, ProbeSite]]) -> list[Link]:
        """Attach to (number, site) pairs of the file open at ``fd``; returns what to close to detach.

        Raises :class:`PrivilegeError` or :class:`BpfError`; nothing stays attached then.
        """
        path = f"/proc/self/fd/{fd}"
        if self.backend is None:
            try:
                links = self._attach_multi(path, sites)
            except (BpfError, OSError) as error:
                # What an older kernel says to an attach type, and a younger one without the feature to a link, it does not know.
                if error.errno not in (errno.EINVAL, errno.E2BIG, errno.EOPNOTSUPP):
                    raise refusal("attach uprobes", error) if isinstance(error, OSError) else error from None
                self.backend = Backend.PERF
            else:
                self.backend = Backend.MULTI
                return links
        if self.backend is Backend.MULTI:
            try:
                return self._attach_multi(path, sites)
            except OSError as error:
                raise refusal("attach uprobes", error) from None
        return self._attach_perf(path, sites)

    def _attach_multi(self, path: str, sites: Sequence[tuple[int, ProbeSite]]) -> list[Link]:
        links: list[Link] = []
        # Leaves first: a call that is entered after its enter is probed is then always seen to leave.
        for kind in (SiteKind.LEAVE, SiteKind.ENTER):
            chosen = [(site.offset, number) for number, site in sites if site.kind is kind]
            if not chosen:
                continue
            try:
                if kind not in self._multi:
                    self._multi[kind] = self._kernel.load(f"{_PROGRAMS[kind]}_cookie", multi=True)
                links.append(attach_uprobe_multi(self._multi[kind], path, chosen))
            except BaseException:
                detach(links)
                raise
        return links

    def _attach_perf(self, path: str, sites: Sequence[tuple[int, ProbeSite]]) -> list[Link]:
        links: list[Link] = []
        try:
            for number, site in sorted(sites, key=lambda pair: -pair[1].kind):
                program = self._kernel.load(f"{_PROGRAMS[site.kind]}_patched", site=number)
                links.append(attach_uprobe(program, path, site.offset))
        except BaseException:
            detach(links)
            raise
        return links

    def attach_lifecycle(self) -> list[Link]:
        """EXEC and EXIT records of processes."""
        links: list[Link] = []
        try:
            for program, tracepoint in (("on_exec", "sched_process_exec"), ("on_exit", "sched_process_exit")):
                fd = self._kernel.load(program, ProgramType.RAW_TRACEPOINT)
                links.append(attach_raw_tracepoint(tracepoint, fd))
        except BaseException:
            detach(links)
            raise
        return links


def detach(links: Sequence[Link]) -> None:
    """Close attachments side by side: each waits for a grace period of the kernel, and they can wait for the same one."""
    if len(links) <= 1:
        for link in links:
            link.close()
        return
    with ThreadPoolExecutor(max_workers=min(len(links), 32)) as pool:
        list(pool.map(Link.close, links))
