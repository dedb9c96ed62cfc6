"""How a job is divided, as MegaTrace's ``config.yaml`` has it, and which ranks of it form groups.

Their analysis reads ``TP``, ``PP`` and ``world_size`` (``trace/analysis/config.yaml`` of github.com/sii-research/Megatrace); its
older version ``tpSize``, ``ppSize`` and ``numRanks`` (``megatrace-analysis/config.yaml`` of github.com/Infrawaves/Megatrace);
data parallelism is what is left. Ranks are numbered as Megatron-LM does by default (``parallel_state.py``, order
``tp-cp-ep-dp-pp``): tensor parallel fastest, pipeline slowest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ncclwatch.ingest.base import IngestError
from ncclwatch.text import clean

NAMES = ("config.yaml", "config.yml", "parallel.yaml")
"""What the file with the division is called; it lies beside the logs, or in the folder above."""
MAX_CONFIG = 1 << 16
HIGHEST_WORLD = 1 << 20
_ENTRY = re.compile(r"^\s*([A-Za-z_]+)\s*[:=]\s*(\d{1,9})\s*(?:#.*)?$")
_SIZES = {
    "tp": "tp", "tp_size": "tp", "tensor_model_parallel_size": "tp", "pp": "pp", "pp_size": "pp",
    "pipeline_model_parallel_size": "pp", "world_size": "world", "dp": "dp", "dp_size": "dp",
    "tpsize": "tp", "ppsize": "pp", "numranks": "world",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of tensor, pipeline and data parallelism; ``world`` is their product. ``source`` says where they are from."""

    tp: int
    pp: int
    dp: int
    source: str = ""

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.tp * self.pp * self.dp

    def groups(self, over: str) -> NDArray[np.int64]:
        """The groups that join ranks which differ in some dimensions only, shape (groups, ranks of a group).

        ``over`` names them by letters: ``t``, ``p``, ``d``; ``e`` is Megatron-LM's group of the first and the last stage.
        """
        grid = np.arange(self.world).reshape(self.pp, self.dp, self.tp)
        if over == "e":
            return np.stack([grid[0].ravel(), grid[-1].ravel()], axis=1)
        axes = [axis for axis, letter in enumerate("pdt") if letter in over]
        kept = [axis for axis in range(3) if axis not in axes]
        size = int(np.prod([grid.shape[axis] for axis in axes]))
        return grid.transpose(*kept, *axes).reshape(-1, size)

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // (self.tp * self.dp)

    def text(self) -> str:
        """``TP 2 x PP 4 x DP 1``."""
        return f"TP {self.tp} x PP {self.pp} x DP {self.dp}"


def beside(files: Sequence[Path]) -> Layout | None:
    """The division that a file beside the logs gives; ``None`` without one. Raises :class:`IngestError` for one that is
    wrong.
    """
    for folder in dict.fromkeys(folder for file in files[:1] for folder in (file.parent, file.parent.parent)):
        for name in NAMES:
            path = folder / name
            try:
                with path.open("rb") as opened:
                    text = opened.read(MAX_CONFIG).decode("utf-8", "replace")
            except OSError:
                continue
            found = _read(text, path)
            if found is not None:
                return found
    return None


def _read(text: str, path: Path) -> Layout | None:
    """What is written in such a file; ``None`` where it is about something else."""
    sizes: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = _ENTRY.match(line)
        name = _SIZES.get(entry[1].lower()) if entry else None
        if entry and name:
            sizes[name] = int(entry[2])
            if not 0 < sizes[name] <= HIGHEST_WORLD:
                raise IngestError(f"{clean(str(path), 200)}:{number}: {name} is {sizes[name]}", "write TP, PP and world_size")
    if "world" not in sizes or not sizes.keys() & {"tp", "pp"}:
        return None
    tp, pp, world = sizes.get("tp", 1), sizes.get("pp", 1), sizes["world"]
    if world % (tp * pp) or sizes.get("dp", world // (tp * pp)) * tp * pp != world:
        why = f"TP {tp} x PP {pp} does not divide a world of {world}"
        raise IngestError(f"{clean(str(path), 200)}: {why}", "correct it, or take the file away")
    return Layout(tp, pp, world // (tp * pp), path.name)
