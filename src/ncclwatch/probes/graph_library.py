"""Which file of a process launches its CUDA graphs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ncclwatch.target.elf import ElfError, ElfFile
from ncclwatch.target.maps import PROC, parse_maps, read_maps_text
from ncclwatch.target.namespaces import open_mapped

_BY_CHOICE = ((re.compile(r"libcudart[-\w]*\.so"), "cudaGraphLaunch"), (re.compile(r"libcuda\.so"), "cuGraphLaunch"))
"""The shared runtime, under the names that wheels give it too, else the driver, which a static runtime calls: a launch is seen
once, for the runtime calls the driver.
"""


def graph_library(pid: int, proc: Path = PROC) -> tuple[str, tuple[int, int]] | None:
    """A path by which the agent can open the file, and its (device, inode); ``None`` where the process has loaded none.

    Raises :class:`ncclwatch.errors.TargetError` and :class:`ncclwatch.errors.PrivilegeError`.
    """
    lines = [line for line in read_maps_text(pid, proc).splitlines() if b"/libcuda" in line]
    mappings = [mapping for mapping in parse_maps(b"\n".join(lines)) if mapping.executable]
    for wanted, launch in _BY_CHOICE:
        for mapping in mappings:
            if wanted.match(mapping.file_name):
                fd, path = open_mapped(pid, mapping, proc)
                status = os.fstat(fd)
                try:
                    with ElfFile(fd, mapping.path) as elf:
                        if elf.exported(launch):
                            return path, (status.st_dev, status.st_ino)
                except ElfError:
                    continue
    return None
