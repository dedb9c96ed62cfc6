"""What an exporter answers, by the form of ``dcgm-exporter``'s documentation."""

from __future__ import annotations

_GPU = 'gpu="{gpu}",UUID="GPU-{gpu}",device="nvidia{gpu}",modelName="NVIDIA H100 80GB HBM3",Hostname="node7"'


def metrics(*samples: tuple[str, int, float]) -> str:
    """Samples (field, GPU, value) as text."""
    lines = []
    for field, gpu, value in samples:
        lines += [f"# HELP {field} made up", f"# TYPE {field} gauge", f"{field}{{{_GPU.format(gpu=gpu)}}} {value}"]
    return "\n".join(lines) + "\n"


TEXT = metrics(
    *(("DCGM_FI_DEV_SM_CLOCK", gpu, 1110 if gpu == 3 else 1980) for gpu in range(4)),
    *(("DCGM_FI_DEV_GPU_UTIL", gpu, 99) for gpu in range(4)),
    ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", 3, 0x48),
    ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", 1, 0x1),
    ("DCGM_FI_DEV_THERMAL_VIOLATION", 3, 12_000_000),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 2, 1),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 1, 0),
    ("DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", 0, 17),
    ("DCGM_FI_DEV_XID_ERRORS", 2, 94),
)
