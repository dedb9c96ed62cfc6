"""What is wrong with a GPU: what its driver says outright, what only a comparison with its peers shows, and what is usual."""

from __future__ import annotations

import msgspec

from ncclwatch.gpu.trouble import troubles
from ncclwatch.model.gpu import GpuHealth, Links, Trouble

WELL = GpuHealth(
    index=0, name="H100", sm_clock=1900, sm_clock_max=1980, reasons=("SwPowerCap",), power=690.0, power_limit=700.0,
    temperature=70, busy=99, ecc_corrected=4, ecc_uncorrected=0, rows_remapped=2, rows_pending=False, rows_failed=False,
    links=Links((0, 1, 2), (3,), {}, {1: 5}), pcie_generation=5, pcie_generation_max=5, pcie_width=16, pcie_width_max=16,
)  # fmt: skip


def of(**changes: object) -> list[Trouble]:
    """Troubles of a GPU that differs so from seven peers that are well."""
    gpu = msgspec.structs.replace(WELL, index=7, **changes)
    return [one.trouble for one in troubles(gpu, [*(msgspec.structs.replace(WELL, index=n) for n in range(7)), gpu])]


def test_what_is_usual_under_load_is_no_trouble() -> None:
    assert of() == []
    assert of(sm_clock=1700, reasons=("SwPowerCap", "ApplicationsClocksSetting")) == [], "boards of one model differ"
    assert of(sm_clock=345, busy=0, reasons=("GpuIdle",), pcie_generation=1) == [], "an idle GPU saves power"
    assert of(ecc_corrected=900, rows_remapped=8) == []
    assert of(links=None) == []


def test_what_the_driver_says_outright() -> None:
    assert of(lost="GPU is lost", ecc_uncorrected=3) == [Trouble.LOST]
    assert of(ecc_uncorrected=1, rows_pending=True) == [Trouble.ECC_UNCORRECTED, Trouble.ROWS_PENDING]
    assert of(rows_failed=True) == [Trouble.ROWS_FAILED]
    assert of(reasons=("HwSlowdown", "HwPowerBrakeSlowdown")) == [Trouble.POWER_BRAKE], "the general reason adds nothing"
    assert of(reasons=("HwSlowdown",)) == [Trouble.HW_SLOWDOWN]
    assert of(reasons=("SwThermalSlowdown", "SwPowerCap"), sm_clock=900) == [Trouble.SW_THERMAL], "the clock is said why"
    assert of(pcie_width=8) == [Trouble.PCIE_NARROW]
    assert of(links=Links((0, 1, 2), (3,), {2: 7}, {})) == [Trouble.NVLINK_ERRORS]


def test_what_only_its_peers_show() -> None:
    assert of(sm_clock=1200) == [Trouble.CLOCKS_LOW]
    assert of(pcie_generation=3) == [Trouble.PCIE_SLOW]
    assert of(links=Links((0, 1), (2, 3))) == [Trouble.NVLINK_DOWN], "link 3 is down on all: not connected on this board"
    assert of(sm_clock=1200, name="A100") == [], "nobody to compare with"


def test_words_have_the_figures() -> None:
    gpu = msgspec.structs.replace(WELL, reasons=("HwThermalSlowdown",), sm_clock=345, temperature=91)
    (found,) = troubles(gpu, [gpu])
    assert found.text == "its clocks are held down (HwThermalSlowdown): SM clock 345 of 1980 MHz, 91 °C, 690 of 700 W"
