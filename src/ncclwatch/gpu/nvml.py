"""Reads every GPU of the node by NVML and writes one JSON object: ``python -m ncclwatch.gpu.nvml``.

A process of its own: a driver in trouble may never return from a call, and whoever asks goes on without it
(:mod:`ncclwatch.gpu.health`). Calls and their meaning: NVIDIA's nvml.h; bindings: nvidia-ml-py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ncclwatch.model.gpu import GpuHealth, GpuLook, Links
from ncclwatch.text import clean

MAX_GPUS = 64
MAX_LINKS = 18
"""Links that any GPU has so far (Hopper and Blackwell)."""
GONE = 2
"""A GPU with so many links in a row that the driver does not know has no more."""

REASONS = {
    0x1: "GpuIdle", 0x2: "ApplicationsClocksSetting", 0x4: "SwPowerCap", 0x8: "HwSlowdown", 0x10: "SyncBoost",
    0x20: "SwThermalSlowdown", 0x40: "HwThermalSlowdown", 0x80: "HwPowerBrakeSlowdown", 0x100: "DisplayClockSetting",
}  # fmt: skip
"""What holds clocks down (``nvmlClocksEventReason*``, nvml.h)."""


def look(nvml: Any) -> GpuLook:
    """Every GPU that the driver lists. ``nvml`` is the module ``pynvml``; raises its ``NVMLError`` where there is no driver."""
    nvml.nvmlInit()
    try:
        driver = clean(_text(nvml.nvmlSystemGetDriverVersion()), 40)
        count = min(int(nvml.nvmlDeviceGetCount()), MAX_GPUS)
        return GpuLook(wall_ns=time.time_ns(), driver=driver, gpus=tuple(_gpu(nvml, index) for index in range(count)))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> GpuHealth:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return GpuHealth(index=index, lost=clean(str(error), 80))
    ask = _Asking(nvml, handle)
    reasons = ask("reasons", _reasons_of(nvml))
    rows = ask("rows", nvml.nvmlDeviceGetRemappedRows) or (None, None, None, None)
    corrected, uncorrected = (ask("ecc", nvml.nvmlDeviceGetTotalEccErrors, kind, 0) for kind in (0, 1))
    power, limit = ask("power", nvml.nvmlDeviceGetPowerUsage), ask("power limit", nvml.nvmlDeviceGetEnforcedPowerLimit)
    busy = ask("utilization", nvml.nvmlDeviceGetUtilizationRates)
    return GpuHealth(
        index=index,
        bus_id=_bus_text(ask("bus id", nvml.nvmlDeviceGetPciInfo)),
        uuid=_text(ask("uuid", nvml.nvmlDeviceGetUUID)),
        name=_text(ask("name", nvml.nvmlDeviceGetName)),
        sm_clock=ask("clocks", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        sm_clock_max=ask("clocks", nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
        memory_clock=ask("clocks", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        reasons=tuple(name for bit, name in REASONS.items() if reasons is not None and reasons & bit),
        power=None if power is None else power / 1000,
        power_limit=None if limit is None else limit / 1000,
        temperature=ask("temperature", nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        busy=None if busy is None else int(busy.gpu),
        ecc_corrected=corrected,
        ecc_uncorrected=uncorrected,
        rows_remapped=None if rows[0] is None else rows[0] + rows[1],
        rows_pending=None if rows[2] is None else bool(rows[2]),
        rows_failed=None if rows[3] is None else bool(rows[3]),
        links=_links(nvml, handle),
        pcie_generation=ask("pcie", nvml.nvmlDeviceGetCurrPcieLinkGeneration),
        pcie_generation_max=ask("pcie", nvml.nvmlDeviceGetMaxPcieLinkGeneration),
        pcie_width=ask("pcie", nvml.nvmlDeviceGetCurrPcieLinkWidth),
        pcie_width_max=ask("pcie", nvml.nvmlDeviceGetMaxPcieLinkWidth),
        lost=ask.lost,
        unavailable=ask.unavailable,
    )


class _Asking:
    """Asks the driver about one GPU; what it does not say is ``None``, with the reason kept by its name."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.unavailable: dict[str, str] = {}
        self.lost = ""

    def __call__(self, name: str, function: Callable[..., Any], *arguments: object) -> Any:
        try:
            return function(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) in (self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_RESET_REQUIRED):
                self.lost = clean(str(error), 80)
            self.unavailable[name] = clean(str(error), 80)
            return None


def _reasons_of(nvml: Any) -> Callable[..., Any]:
    """The call is ``ClocksEventReasons`` since driver 535, ``ClocksThrottleReasons`` before."""

    def reasons(handle: Any) -> Any:
        try:
            return nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        except nvml.NVMLError:
            return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)

    return reasons


def _links(nvml: Any, handle: Any) -> Links | None:
    """Its NVLinks; ``None`` for a GPU without."""
    state: dict[int, bool] = {}
    counters: dict[int, dict[int, int]] = {nvml.NVML_NVLINK_ERROR_DL_RECOVERY: {}, nvml.NVML_NVLINK_ERROR_DL_REPLAY: {}}
    unknown = 0
    for link in range(MAX_LINKS):
        try:
            state[link] = bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError:
            unknown += 1
            if unknown >= GONE:
                break
            continue
        for counter, counted in counters.items():
            try:
                counted[link] = int(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter))
            except nvml.NVMLError:
                break
    if not any(state.values()) and not state:
        return None
    recoveries, replays = ({link: count for link, count in counted.items() if count} for counted in counters.values())
    active = tuple(link for link, up in state.items() if up)
    return Links(active, tuple(link for link, up in state.items() if not up), recoveries, replays)


def _bus_text(info: Any) -> str:
    """``0000:07:00.0``, as the kernel and :mod:`ncclwatch.target.traits` have it (NVML's domain has eight digits)."""
    text = _text(getattr(info, "busId", "")).lower()
    domain, colon, rest = text.partition(":")
    return f"{domain[-4:]}{colon}{rest}" if colon else text


def _text(value: Any) -> str:
    return clean(value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or ""), 80)


def _lines() -> Iterator[GpuLook]:
    try:
        import pynvml
    except ImportError:
        yield GpuLook(problem="the package nvidia-ml-py is not installed")
        return
    try:
        yield look(pynvml)
    except pynvml.NVMLError as error:
        yield GpuLook(problem=clean(str(error), 120))


if __name__ == "__main__":
    for told in _lines():
        sys.stdout.buffer.write(msgspec.json.encode(told))
