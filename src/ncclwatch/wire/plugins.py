"""External network plugins of NCCL (aws-ofi-nccl, HPC-X's sharp and ucx, FasTrak, …): which one a process uses, in its own words.

Three witnesses: the name of the network in NCCL's memory (``ncclNet_t.name``), the file it mapped (NCCL asks for
``libnccl-net.so`` or ``libnccl-net-NAME.so``, src/misc/net.cc of v2.18.3-1, plugin/net.cc of v2.27.5-1), and ``NCCL_NET_PLUGIN``
in its environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ncclwatch.target.maps import Mapping
from ncclwatch.text import clean

VARIABLE = "NCCL_NET_PLUGIN"
MAX_ENVIRONMENT = 1 << 20
_FILE = re.compile(r"libnccl-net[^/]*\.so[.\d]*$")


@dataclass(frozen=True, slots=True)
class NetPlugin:
    """What is known of a process's plugin. ``files`` are those mapped, as the process names them; ``variable`` is
    ``NCCL_NET_PLUGIN`` as it was when the process began, ``None`` where it was not set or cannot be read."""

    files: tuple[str, ...]
    variable: str | None

    @property
    def is_external(self) -> bool:
        """Whether a plugin's file is mapped; one that is mapped is not always the one in use."""
        return bool(self.files)

    def __str__(self) -> str:
        parts = [f"mapped {', '.join(clean(file, 100) for file in self.files)}"] if self.files else []
        if self.variable is not None:
            parts.append(f"{VARIABLE}={clean(self.variable, 80)}")
        return "; ".join(parts)


def net_plugin(pid: int, mappings: Iterable[Mapping], proc: Path = Path("/proc")) -> NetPlugin:
    """The plugin of a process, from its memory map and environment."""
    variable = _variable(proc / str(pid) / "environ")
    named = (variable or "").strip()
    files = {
        mapping.file_path
        for mapping in mappings
        if mapping.is_file and (_FILE.search(mapping.file_path) or (".so" in named and mapping.file_path.endswith(f"/{named}")))
    }
    return NetPlugin(tuple(sorted(files)), variable)


def _variable(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_ENVIRONMENT)
    except OSError:
        return None
    for entry in data.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals and name == VARIABLE.encode():
            return value.decode("utf-8", "replace")
    return None
