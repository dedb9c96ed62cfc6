"""``ncclwatch gpus``: the GPUs of this node as their driver tells them, and what is wrong with any."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ncclwatch.cli.options import JsonOption
from ncclwatch.cli.output import emit, emit_json, plain
from ncclwatch.errors import TargetError
from ncclwatch.model.gpu import GpuHealth, GpuLook, Links
from ncclwatch.model.verdict import Verdict
from ncclwatch.text import columns

_HEADER = ("GPU", "BUS", "MODEL", "SM MHZ", "POWER W", "°C", "BUSY", "PCIE", "NVLINK", "ECC", "TROUBLE")


def gpus(as_json: JsonOption = False) -> None:
    """Say what is wrong with the GPUs of this node: clocks held down, memory errors, NVLinks and PCIe lanes that are missing.

    Asks the driver by NVML, in a process of its own: a driver that does not answer holds nothing up. Runs nothing on any GPU.
    """
    from ncclwatch.gpu.health import look_at_gpus

    look = look_at_gpus()
    if look.problem:
        raise TargetError(f"no GPU can be asked: {look.problem}", "GPU health needs NVIDIA's driver (libnvidia-ml.so.1) here")
    if as_json:
        emit_json(to_json(look))
        return
    for line in lines(look):
        emit(line)


def to_json(look: GpuLook) -> dict[str, object]:
    """``schema`` = ``ncclwatch.gpus/1``; fields are only ever added."""
    from ncclwatch.gpu.trouble import troubles

    told = []
    for gpu in look.gpus:
        found = [{"trouble": one.trouble.value, "text": one.text} for one in troubles(gpu, look.gpus)]
        told.append({**plain(msgspec.to_builtins(gpu, str_keys=True)), "troubles": found})
    return {"schema": "ncclwatch.gpus/1", "wall_ns": look.wall_ns, "driver": look.driver, "gpus": told}


def lines(look: GpuLook) -> Iterator[str]:
    """A line a GPU, then each trouble in words."""
    from ncclwatch.gpu.trouble import troubles

    found = {gpu.index: troubles(gpu, look.gpus) for gpu in look.gpus}
    rows = [_row(gpu, ", ".join(one.trouble.value for one in found[gpu.index])) for gpu in look.gpus]
    yield from columns(_HEADER, rows, right=(0, 3, 4, 5, 6, 9))
    for index, told in found.items():
        yield from (f"GPU {index}: {one.text}" for one in told)
    if not any(found.values()):
        yield "nothing is wrong with any, as far as the driver says"
    silent = sorted({name for gpu in look.gpus if not gpu.lost for name in gpu.unavailable})
    if silent:
        yield f"not told by the driver: {', '.join(silent)}"


def _row(gpu: GpuHealth, trouble: str) -> Sequence[str]:
    return (
        str(gpu.index),
        gpu.bus_id,
        gpu.name,
        _of(gpu.sm_clock, gpu.sm_clock_max),
        _of(gpu.power, gpu.power_limit),
        _number(gpu.temperature),
        f"{gpu.busy}%" if gpu.busy is not None else "",
        f"gen{gpu.pcie_generation} x{gpu.pcie_width}" if gpu.pcie_generation is not None and gpu.pcie_width is not None else "",
        _links(gpu.links),
        _number(gpu.ecc_uncorrected),
        trouble,
    )


def _of(value: float | None, most: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if most is None else f"{value:.0f}/{most:.0f}"


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _links(links: Links | None) -> str:
    return "" if links is None else f"{len(links.active)}/{len(links.active) + len(links.inactive)}"


# --- beside a verdict ----------------------------------------------------------------------------------------------------

BESIDE_S = 2.0
"""What a verdict waits for the driver at most."""


def beside(verdicts: Sequence[Verdict], look: Callable[[float], GpuLook] | None = None) -> list[Verdict]:
    """Verdicts with what is wrong with the GPUs of their culprits on this node. The driver is asked once, where one is named."""
    from ncclwatch.gpu.health import look_at_gpus
    from ncclwatch.knowledge.looks import on_gpus_of, with_gpus

    host = socket.gethostname()
    if not any(on_gpus_of(verdict, [host]) for verdict in verdicts):
        return list(verdicts)
    told = {host: (look or look_at_gpus)(BESIDE_S)}
    return [with_gpus(verdict, told) for verdict in verdicts]
