"""Which algorithm and protocol NCCL chose for which operation, from its own log (``NCCL_DEBUG=INFO``, subsystem ``TUNING``).

with Job(..., as_nccl_likes=True, env=LOG) as job:
    job.wait()
    chosen(job.log(0))
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING"}
"""Environment that makes rank 0 write its choices."""

ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
RUN = (*((algorithm, protocol) for algorithm in ("Ring", "Tree") for protocol in PROTOCOLS), ("PAT", "Simple"))
"""What the stand-in plays."""

# NCCL 2.21 writes numbers and no collective (topoGetAlgoInfo of src/enqueue.cc), later releases names in capitals.
_LINE = re.compile(r"NCCL INFO (?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)")


class Choice(NamedTuple):
    """One choice. ``nbytes`` is the size that NCCL's model takes for the operation: from 2.22 on the elements of AllGather and
    ReduceScatter are those of one rank. ``collective`` is empty up to 2.21.
    """

    collective: str
    nbytes: int
    algorithm: str
    protocol: str


def chosen(log: str) -> list[Choice]:
    """All choices of a log, in its order."""
    found = []
    for collective, nbytes, algorithm, protocol in _LINE.findall(log):
        found.append(Choice(collective, int(nbytes), _name(algorithm, ALGORITHMS), _name(protocol, PROTOCOLS)))
    return found


def not_covered(choices: Collection[Choice]) -> list[str]:
    """What the stand-in plays and NCCL did not choose, as ``Ring/LL128``."""
    seen = {(choice.algorithm, choice.protocol) for choice in choices}
    return ["/".join(pair) for pair in RUN if pair not in seen]


def _name(text: str, names: tuple[str, ...]) -> str:
    return names[int(text)] if text.isdigit() else next(name for name in names if name.upper() == text.replace("_", "").upper())
