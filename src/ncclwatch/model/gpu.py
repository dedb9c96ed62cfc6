"""The state of a GPU as its driver tells it, and what is wrong with it; plain data."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Trouble(StrEnum):
    """What is wrong with a GPU; a closed list, the worst first. Names of NVML's own (nvml.h) stand in brackets."""

    LOST = "lost"
    """The driver cannot reach it (GPU_IS_LOST), or wants it reset (RESET_REQUIRED)."""
    ECC_UNCORRECTED = "ecc-uncorrected"
    """Uncorrected memory errors since the driver was loaded."""
    ROWS_FAILED = "rows-failed"
    """A row of its memory could not be remapped."""
    ROWS_PENDING = "rows-pending"
    """Rows are remapped at the next reset: until then it works with memory that has failed."""
    NVLINK_DOWN = "nvlink-down"
    """A link is inactive that its peers of the same model have active."""
    NVLINK_ERRORS = "nvlink-errors"
    """Links had to recover."""
    HW_SLOWDOWN = "hw-slowdown"
    """Hardware holds its clocks down (HwSlowdown): heat, the power brake, or a power supply that fails."""
    HW_THERMAL = "hw-thermal"
    POWER_BRAKE = "power-brake"
    SW_THERMAL = "sw-thermal"
    """The driver holds its clocks down because of heat."""
    CLOCKS_LOW = "clocks-low"
    """It is busy, and its clock is far below that of busy peers of the same model."""
    PCIE_NARROW = "pcie-narrow"
    """Fewer PCIe lanes than GPU and slot could have."""
    PCIE_SLOW = "pcie-slow"
    """It is busy, and its PCIe generation is below that of busy peers of the same model."""


class Links(msgspec.Struct, frozen=True):
    """NVLinks of a GPU by number: which are active, and how often each had to recover and to send again (since the driver was
    loaded)."""

    active: tuple[int, ...] = ()
    inactive: tuple[int, ...] = ()
    recoveries: dict[int, int] = {}
    replays: dict[int, int] = {}


class GpuHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at one moment; ``None`` where its driver did not say, with the reason in ``unavailable``.

    Clocks in MHz, power in watts, temperature in degrees Celsius, ``busy`` in percent. ``reasons``: NVML's names for what holds
    its clocks down. ``lost``: the driver's own words where it does not reach the GPU.
    """

    index: int
    bus_id: str = ""
    uuid: str = ""
    name: str = ""
    lost: str = ""
    sm_clock: int | None = None
    sm_clock_max: int | None = None
    memory_clock: int | None = None
    reasons: tuple[str, ...] = ()
    power: float | None = None
    power_limit: float | None = None
    temperature: int | None = None
    busy: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    rows_remapped: int | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    links: Links | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    unavailable: dict[str, str] = {}


class GpuLook(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of a node, or why there are none to be seen; ``wall_ns``: CLOCK_REALTIME when they were read."""

    wall_ns: int = 0
    driver: str = ""
    gpus: tuple[GpuHealth, ...] = ()
    problem: str = ""
