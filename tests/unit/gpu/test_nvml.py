"""What is asked of NVML: a driver that knows only half of it, one that has lost a GPU, names that would steer a terminal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ncclwatch.gpu.nvml import look


class NVMLError(Exception):
    """As pynvml's: ``value`` is the driver's number."""

    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__({3: "Not Supported", 15: "GPU is lost", 2: "Invalid Argument"}[value])


def refuse(value: int) -> Any:
    def call(*arguments: object) -> None:
        raise NVMLError(value)

    return call


def driver(**functions: Any) -> Any:
    """A module like pynvml with one GPU, of which it says nothing but what is given."""
    names = (
        "ClockInfo MaxClockInfo CurrentClocksEventReasons CurrentClocksThrottleReasons PowerUsage EnforcedPowerLimit "
        "Temperature UtilizationRates TotalEccErrors RemappedRows NvLinkState NvLinkErrorCounter "
        "CurrPcieLinkGeneration MaxPcieLinkGeneration CurrPcieLinkWidth MaxPcieLinkWidth UUID Name PciInfo"
    )
    module = {f"nvmlDeviceGet{name}": refuse(3) for name in names.split()}
    module |= {
        "NVMLError": NVMLError, "NVML_ERROR_GPU_IS_LOST": 15, "NVML_ERROR_RESET_REQUIRED": 16, "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2, "NVML_TEMPERATURE_GPU": 0, "NVML_NVLINK_ERROR_DL_RECOVERY": 1, "NVML_NVLINK_ERROR_DL_REPLAY": 0,
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlSystemGetDriverVersion": lambda: "550.54",
        "nvmlDeviceGetCount": lambda: 1, "nvmlDeviceGetHandleByIndex": lambda index: index,
    }  # fmt: skip
    return SimpleNamespace(**(module | functions))


def test_what_the_driver_does_not_say_is_unknown_with_the_reason() -> None:
    (gpu,) = look(driver()).gpus
    assert (gpu.sm_clock, gpu.ecc_uncorrected, gpu.rows_pending, gpu.links, gpu.reasons, gpu.lost) == (None,) * 4 + ((), "")
    assert gpu.unavailable["ecc"] == "Not Supported"


def test_a_lost_gpu_is_said_and_the_others_are_read() -> None:
    def temperature(handle: int, sensor: int) -> int:
        del sensor
        if handle == 1:
            raise NVMLError(15)
        return 61

    def handle(index: int) -> int:
        if index == 2:
            raise NVMLError(15)
        return index

    told = look(driver(nvmlDeviceGetCount=lambda: 3, nvmlDeviceGetTemperature=temperature, nvmlDeviceGetHandleByIndex=handle))
    assert [(gpu.temperature, gpu.lost) for gpu in told.gpus] == [(61, ""), (None, "GPU is lost"), (None, "GPU is lost")]


def test_links_are_those_that_the_driver_knows() -> None:
    def state(handle: int, link: int) -> int:
        del handle
        if link >= 4:
            raise NVMLError(2)
        return int(link != 1)

    asked: list[int] = []

    def errors(handle: int, link: int, counter: int) -> int:
        del handle
        asked.append(link)
        return 7 if (link, counter) == (2, 1) else 0

    (gpu,) = look(driver(nvmlDeviceGetNvLinkState=state, nvmlDeviceGetNvLinkErrorCounter=errors)).gpus
    assert gpu.links is not None
    assert (gpu.links.active, gpu.links.inactive) == ((0, 2, 3), (1,))
    assert (gpu.links.recoveries, gpu.links.replays, max(asked)) == ({2: 7}, {}, 3)


def test_names_are_those_of_the_kernel_and_steer_no_terminal() -> None:
    info = SimpleNamespace(busId=b"00000000:3B:00.0")
    (gpu,) = look(driver(nvmlDeviceGetPciInfo=lambda _: info, nvmlDeviceGetName=lambda _: "H100\x1b[2J" + "x" * 200)).gpus
    assert gpu.bus_id == "0000:3b:00.0"
    assert "\x1b" not in gpu.name and len(gpu.name) <= 80


def test_a_call_that_older_drivers_lack_has_an_older_name() -> None:
    (gpu,) = look(driver(nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 0x48)).gpus
    assert gpu.reasons == ("HwSlowdown", "HwThermalSlowdown")
