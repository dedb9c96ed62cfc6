"""Text of DCGM's exporter (Prometheus): clocks, throttling, ECC and NVLink errors of GPUs, as context beside a verdict.

Facts: NVIDIA dcgm-exporter ``etc/default-counters.csv`` (names and units of fields), DCGM ``dcgm_fields.h``
(``DCGM_FI_DEV_CLOCK_THROTTLE_REASONS``, ``DCGM_FI_DEV_XID_ERRORS``), NVML ``nvmlClocksThrottleReasons`` (bits). A GPU that is
hot or has errors is no culprit by that: nothing here says that a job waits for it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.ingest.base import Format, Ingested, IngestError
from ncclwatch.model.verdict import Verdict
from ncclwatch.text import clean

MOST_BYTES = 64 << 20
LONGEST_LINE = 1 << 14
MOST_SAMPLES = 500_000
MOST_LINES = 40
"""Bound: lines of context that are told."""
SUMMED = 3
"""Bound: of those that stand in the summary, and so beside what another format says."""
SLOW_CLOCK = 0.9
"""Part of the fastest GPU's SM clock below which a GPU is told to be slower, both under load; chosen."""
BUSY = 50.0
"""Per cent of utilisation from which on a GPU counts as under load; chosen."""
_LINE = re.compile(r"^(DCGM_FI_[A-Z0-9_]{1,100})(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"\s*,?\s*')
REASONS = {
    0x4: "software power cap", 0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}  # fmt: skip
"""Bits of the reasons for which a clock is held down that are out of the ordinary (idle and application clocks are not)."""
ERRORS = {
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "uncorrectable ECC errors since the driver was loaded",
    "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": "uncorrectable ECC errors in its life",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "memory rows remapped after uncorrectable errors",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "row remapping has failed",
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": "NVLink flow-control CRC errors",
    "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": "NVLink data CRC errors",
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": "NVLink retries",
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": "NVLink recoveries",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "PCIe retries",
}  # fmt: skip
VIOLATIONS = {
    "DCGM_FI_DEV_POWER_VIOLATION": "by the power limit", "DCGM_FI_DEV_THERMAL_VIOLATION": "by heat",
    "DCGM_FI_DEV_RELIABILITY_VIOLATION": "for reliability", "DCGM_FI_DEV_BOARD_LIMIT_VIOLATION": "by the board's limit",
}  # fmt: skip
"""Time for which clocks were held down, as the exporter has it: us by its documentation, ns by DCGM's; so only whether is
told.
"""


class Gpu(NamedTuple):
    """One GPU of one host."""

    host: str
    number: str
    model: str

    def text(self) -> str:
        """``GPU 3 of node7``."""
        return f"GPU {self.number} of {self.host}" if self.host else f"GPU {self.number}"


class Dcgm(Format):
    """What an exporter answered, one file a host or several; told beside the verdict of another format in the same folder."""

    name = "dcgm"
    what = "DCGM exporter's metrics"

    def recognises(self, head: bytes, path: Path) -> bool:
        """Text of Prometheus with fields of DCGM."""
        return re.search(rb"^[ \t]*(?:# (?:HELP|TYPE) )?DCGM_FI_[A-Z]", head, re.M) is not None

    def read(self, files: Sequence[Path]) -> Sequence[Ingested]:
        """All files together. Raises :class:`IngestError` where none of them holds a field of DCGM."""
        problems: list[str] = []
        values: dict[Gpu, dict[str, float]] = defaultdict(dict)
        for file in files:
            try:
                _take(file, values, problems)
            except OSError as error:
                problems.append(f"{clean(str(file), 200)}: {error.strerror or 'cannot be read'}")
        if not values:
            raise IngestError(problems[0] if problems else "no field of DCGM", "give what `curl HOST:9400/metrics` answers")
        lines = list(context(values))
        more = [f"… {len(lines) - MOST_LINES} more (DCGM)"] if len(lines) > MOST_LINES else []
        told = tuple(lines[:MOST_LINES] + more) or ("DCGM: no throttling, no errors, clocks alike on all GPUs",)

        def amend(verdict: Verdict) -> Verdict:
            return replace(verdict, summary="; ".join(told[:SUMMED]), evidence=(*verdict.evidence, *told), next_steps=())

        blind = ("DCGM's metrics say nothing of NCCL: nobody is accused by them",)
        batches: tuple[NodeBatch, ...] = ()
        return [Ingested(batches, problems, blind, told, amend=amend)]


def _take(path: Path, values: dict[Gpu, dict[str, float]], problems: list[str]) -> None:
    """The samples of one file; a metric without a host is of the file's name."""
    name, bad, first, number = clean(str(path), 200), 0, 0, 0
    left = MOST_BYTES
    with path.open("rb") as file:
        while left > 0 and (raw := file.readline(LONGEST_LINE)):
            left -= len(raw)
            number += 1
            line = raw.decode("utf-8", "replace").strip()
            if not line.startswith("DCGM_FI_"):
                continue
            sample = _sample(line, path.stem)
            if sample is None:
                bad, first = bad + 1, first or number
                continue
            gpu, field, value = sample
            if len(values) < MOST_SAMPLES:
                values[gpu][field] = value
    if bad:
        problems.append(f"{name}: {bad} lines are no samples and were left out, the first is line {first}")
    if left <= 0:
        problems.append(f"{name}: only the first {MOST_BYTES >> 20} MiB were read")


def _sample(line: str, stem: str) -> tuple[Gpu, str, float] | None:
    """One sample; ``None`` where the line is none."""
    match = _LINE.match(line)
    if match is None:
        return None
    try:
        value = float(match[3])
    except ValueError:
        return None
    labels = {key: found[:200] for key, found in _LABEL.findall(match[2] or "")}
    number = labels.get("gpu", labels.get("device", "?"))
    host = labels.get("Hostname", labels.get("hostname", labels.get("instance", stem)))
    return Gpu(clean(host, 64), clean(number, 16), clean(labels.get("modelName", ""), 40)), match[1], value


def context(values: dict[Gpu, dict[str, float]]) -> Iterator[str]:
    """What is out of the ordinary, a line each, GPU by GPU."""
    clocks = {
        gpu: of["DCGM_FI_DEV_SM_CLOCK"] for gpu, of in values.items()
        if of.get("DCGM_FI_DEV_SM_CLOCK", 0) > 0 and of.get("DCGM_FI_DEV_GPU_UTIL", 100.0) >= BUSY
    }  # fmt: skip
    fastest: dict[str, float] = defaultdict(float)
    for gpu, clock in clocks.items():
        fastest[gpu.model] = max(fastest[gpu.model], clock)
    for gpu in sorted(values):
        of = values[gpu]
        if gpu in clocks and clocks[gpu] < SLOW_CLOCK * fastest[gpu.model]:
            yield f"{gpu.text()}: SM clock {clocks[gpu]:.0f} MHz, others of its model up to {fastest[gpu.model]:.0f} MHz (DCGM)"
        reasons = of.get("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", of.get("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", 0.0))
        bits = int(reasons) if 0 <= reasons < 1 << 53 else 0
        if held := [text for bit, text in REASONS.items() if bits & bit]:
            yield f"{gpu.text()}: its clock is held down: {', '.join(held)} (DCGM)"
        if violations := [text for field, text in VIOLATIONS.items() if of.get(field, 0.0) > 0]:
            yield f"{gpu.text()}: its clock has been held down {', '.join(violations)} since the exporter began to count (DCGM)"
        for field, text in ERRORS.items():
            if of.get(field, 0.0) > 0:
                yield f"{gpu.text()}: {of[field]:.0f} {text} (DCGM)"
        if of.get("DCGM_FI_DEV_XID_ERRORS", 0.0) > 0:
            yield f"{gpu.text()}: last XID {of['DCGM_FI_DEV_XID_ERRORS']:.0f} (DCGM)"
