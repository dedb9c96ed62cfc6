"""What is wrong with a GPU: by what its driver says of it, and by how it differs from its peers of the same model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from ncclwatch.model.gpu import GpuHealth, Trouble

SLOW_CLOCK = 0.8
"""Of the median clock of busy peers: below, a GPU is slow. Boards of one model differ by a few percent, a power cap of one job's
GPUs by some ten."""
BUSY = 10
"""Percent: a GPU that does less lets its clocks and its PCIe generation down by itself."""

_HELD_DOWN = {
    "HwThermalSlowdown": Trouble.HW_THERMAL,
    "HwPowerBrakeSlowdown": Trouble.POWER_BRAKE,
    "HwSlowdown": Trouble.HW_SLOWDOWN,
    "SwThermalSlowdown": Trouble.SW_THERMAL,
}
"""Reasons that are trouble; a power cap (SwPowerCap) is usual under load, and an application clock is somebody's choice."""


class Found(NamedTuple):
    """One trouble of one GPU, in words with the figures."""

    trouble: Trouble
    text: str


def troubles(gpu: GpuHealth, node: Sequence[GpuHealth]) -> list[Found]:
    """What is wrong with a GPU, the worst first; ``node``: all GPUs of the node."""
    if gpu.lost:
        return [Found(Trouble.LOST, f"the driver does not reach it: {gpu.lost}")]
    peers = [one for one in node if one.index != gpu.index and one.name == gpu.name and not one.lost]
    found = [*_memory(gpu), *_links(gpu, peers), *_clocks(gpu, peers), *_pcie(gpu, peers)]
    return sorted(found, key=lambda one: list(Trouble).index(one.trouble))


def _memory(gpu: GpuHealth) -> Iterator[Found]:
    if gpu.ecc_uncorrected:
        yield Found(Trouble.ECC_UNCORRECTED, f"{gpu.ecc_uncorrected} uncorrected memory errors since the driver was loaded")
    if gpu.rows_failed:
        yield Found(Trouble.ROWS_FAILED, "a row of its memory could not be remapped")
    if gpu.rows_pending:
        yield Found(Trouble.ROWS_PENDING, "rows of its memory wait for a reset to be remapped")


def _links(gpu: GpuHealth, peers: Sequence[GpuHealth]) -> Iterator[Found]:
    if gpu.links is None:
        return
    known = [peer.links for peer in peers if peer.links is not None]
    active = Counter(link for links in known for link in links.active)
    down = [link for link in gpu.links.inactive if active[link] * 2 > len(known)]
    if down:
        yield Found(Trouble.NVLINK_DOWN, f"NVLink {', '.join(map(str, down))} inactive, active on its peers")
    if gpu.links.recoveries:
        times = ", ".join(f"{link} ({count} times)" for link, count in sorted(gpu.links.recoveries.items()))
        yield Found(Trouble.NVLINK_ERRORS, f"NVLink had to recover: {times}")


def _clocks(gpu: GpuHealth, peers: Sequence[GpuHealth]) -> Iterator[Found]:
    held = [trouble for reason, trouble in _HELD_DOWN.items() if reason in gpu.reasons]
    for trouble in held if len(held) < 2 else [one for one in held if one is not Trouble.HW_SLOWDOWN]:
        yield Found(trouble, f"its clocks are held down ({', '.join(gpu.reasons)}){_figures(gpu)}")
    others = [peer.sm_clock for peer in peers if _busy(peer) and peer.sm_clock is not None]
    if not held and _busy(gpu) and gpu.sm_clock is not None and others and gpu.sm_clock < SLOW_CLOCK * median(others):
        reasons = f" ({', '.join(gpu.reasons)})" if gpu.reasons else ""
        text = f"SM clock {gpu.sm_clock} MHz where busy peers have {median(others):.0f}{reasons}"
        yield Found(Trouble.CLOCKS_LOW, text)


def _pcie(gpu: GpuHealth, peers: Sequence[GpuHealth]) -> Iterator[Found]:
    if gpu.pcie_width is not None and gpu.pcie_width_max is not None and gpu.pcie_width < gpu.pcie_width_max:
        yield Found(Trouble.PCIE_NARROW, f"PCIe x{gpu.pcie_width} where x{gpu.pcie_width_max} is possible")
    others = [peer.pcie_generation for peer in peers if _busy(peer) and peer.pcie_generation is not None]
    if _busy(gpu) and gpu.pcie_generation is not None and others and gpu.pcie_generation < median(others):
        yield Found(Trouble.PCIE_SLOW, f"PCIe generation {gpu.pcie_generation} where busy peers have {median(others):.0f}")


def _busy(gpu: GpuHealth) -> bool:
    return gpu.busy is not None and gpu.busy >= BUSY


def _figures(gpu: GpuHealth) -> str:
    told = [
        f"SM clock {gpu.sm_clock} of {gpu.sm_clock_max} MHz" if gpu.sm_clock is not None and gpu.sm_clock_max else "",
        f"{gpu.temperature} °C" if gpu.temperature is not None else "",
        f"{gpu.power:.0f} of {gpu.power_limit:.0f} W" if gpu.power is not None and gpu.power_limit else "",
    ]
    words = ", ".join(filter(None, told))
    return f": {words}" if words else ""
