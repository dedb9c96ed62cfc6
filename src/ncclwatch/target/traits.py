"""Traits of a process and its node, from ``/proc`` and ``/sys``: bounded; what is not there is left out. All but the CPUs that a
process is given are read once.

GPUs are those that the driver lists (``/proc/driver/nvidia/gpus/*/information``); rates, firmware and PCIe links are the kernel's
(Documentation/ABI/stable/sysfs-class-infiniband, Documentation/ABI/testing/sysfs-bus-pci).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from ncclwatch.errors import NcclwatchError
from ncclwatch.model.traits import GpuTrait, NicTrait, Traits
from ncclwatch.target.cgroup import group_folders
from ncclwatch.target.maps import PROC, read_bounded
from ncclwatch.text import clean

SYS = Path("/sys")
MAX_SETTINGS, MAX_VALUE, MAX_DEVICES, MAX_FILE = 64, 200, 32, 1 << 16
NODE_EVERY_S = 60
"""What is of the node is read again after so long."""

PREFIXES = ("NCCL_", "TORCH_NCCL_", "UCX_", "FI_", "OFI_NCCL_")
NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY\b")
"""In the name of a variable: its value is never kept."""
_SLURM_JOB = re.compile(r"/job_(\d{1,12})(?:/|$)")
_POD_UID = re.compile(r"/(?:kubepods[^/]*/)?(?:[^/]*-)?pod([0-9a-f]{8}[-_][0-9a-f-_]{27})")
MAX_CPU_LIST = 2000
_CPU_LIST = rf"[\d,-]{{1,{MAX_CPU_LIST}}}"
"""``0-7,32-39``."""
_ALLOWED = re.compile(rf"^Cpus_allowed_list:\s*({_CPU_LIST})$", re.MULTILINE)
_PYTHON = re.compile(r"(?:libpython|/python)(\d\.\d{1,2})")


def traits(pid: int, environ: Mapping[str, str], proc: Path = PROC, sys: Path = SYS) -> Traits:
    """The traits of a process; ``environ`` as it was at exec."""
    gpus, nics, rest = _node(proc, sys, int(time.monotonic()) // NODE_EVERY_S)
    groups = _process_text(proc, pid, "cgroup")
    job = environ.get("SLURM_JOB_ID", "") or _first(_SLURM_JOB, groups)
    inside = "KUBERNETES_SERVICE_HOST" in environ or "kubepods" in groups
    pod = environ.get("POD_NAME", "") or (environ.get("HOSTNAME", "") if inside else "") or _first(_POD_UID, groups)
    return Traits(
        node=_word(environ.get("SLURMD_NODENAME", "") or environ.get("NODE_NAME", "")),
        job=job if job.isdigit() and len(job) <= 12 else "", namespace=_word(environ.get("POD_NAMESPACE", "")), pod=_word(pod),
        settings=settings(environ), cpus=_cpus(pid, proc), cpu_group=cpu_group(pid, proc), cpu_quota=cpu_quota(pid, proc),
        python=python_version(proc, pid), gpus=gpus, nics=nics, **rest,
    )  # fmt: skip


def with_cpus_now(known: Traits, pid: int, proc: Path = PROC) -> Traits:
    """The traits with the CPUs that the process is given now; the same object where these cannot be read."""
    cpus = _cpus(pid, proc)
    return replace(known, cpus=cpus, cpu_group=cpu_group(pid, proc), cpu_quota=cpu_quota(pid, proc)) if cpus else known


def settings(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that steer NCCL and what carries it, in the order of their names; secrets are left out."""
    wanted = sorted(name for name in environ if name.startswith(PREFIXES) or name in NAMES)
    kept = [name for name in wanted if SECRET.search(name) is None]
    return tuple((clean(name, 64), clean(environ[name], MAX_VALUE)) for name in kept[:MAX_SETTINGS])


def cpu_group(pid: int, proc: Path = PROC) -> str:
    """The CPUs of the set of the process's control group, of the nearest one above it that has a set; empty where none is shown.

    (``cpuset.cpus.effective``, Documentation/admin-guide/cgroup-v2.rst; ``cpuset.effective_cpus`` of the older interface.)
    """
    files = ("cpuset.cpus.effective", "cpuset.effective_cpus")
    texts = (_text(folder / name, MAX_CPU_LIST) for folder in group_folders(pid, proc, "cpuset") for name in files)
    return next((text for text in texts if re.fullmatch(_CPU_LIST, text)), "")


def cpu_quota(pid: int, proc: Path = PROC) -> float | None:
    """CPUs that the tightest limit of the process's control groups gives it; ``None`` without one."""
    found = []
    for folder in group_folders(pid, proc):
        words = _text(folder / "cpu.max").split() or [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]
        if len(words) == 2 and all(word.isdigit() and 0 < len(word) <= 12 for word in words) and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return round(min(found), 3) if found else None


@lru_cache(maxsize=4)
def _node(proc: Path, sys: Path, _period: int) -> tuple[tuple[GpuTrait, ...], tuple[NicTrait, ...], dict[str, str]]:
    uname = os.uname()
    model = re.search(r"^model name\s*:\s*(.+)$", _text(proc / "cpuinfo"), re.MULTILINE)
    driver = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)", _text(proc / "driver/nvidia/version"))
    rest = {"machine": uname.machine, "kernel": clean(uname.release, 64), "cpu_model": clean(model[1], 80) if model else ""}
    rest["driver"] = driver[1] if driver else ""
    return tuple(_gpus(proc, sys)), tuple(_nics(sys)), rest


def _gpus(proc: Path, sys: Path) -> Iterator[GpuTrait]:
    for folder in _entries(proc / "driver/nvidia/gpus"):
        fields = dict(line.partition(":")[::2] for line in _text(folder / "information").splitlines())
        known = {name.strip(): clean(value.strip(), 80) for name, value in fields.items()}
        bus_id = folder.name.lower()
        yield GpuTrait(bus_id, known.get("Model", ""), known.get("GPU UUID", ""), _pcie(sys / "bus/pci/devices" / bus_id))


def _nics(sys: Path) -> Iterator[NicTrait]:
    taken: set[str] = set()
    for folder in _entries(sys / "class/infiniband"):
        rates = sorted({rate for port in _entries(folder / "ports") if (rate := _text(port / "rate"))})
        netdevs = [entry.name for entry in _entries(folder / "device/net")]
        taken.update(netdevs)
        mtus = sorted({mtu for name in netdevs if (mtu := _text(sys / "class/net" / name / "mtu"))})
        model = _text(folder / "board_id") or _text(folder / "hca_type")
        firmware, link = _text(folder / "fw_ver"), _pcie(folder / "device")
        yield NicTrait(clean(folder.name, 64), ", ".join(rates), firmware, model, link, ", ".join(mtus))
    for folder in _entries(sys / "class/net"):
        if folder.name not in taken and (folder / "device").exists():
            speed = _text(folder / "speed")
            rate = f"{speed} Mb/s" if speed.isdigit() else ""
            yield NicTrait(clean(folder.name, 64), rate, "", "", _pcie(folder / "device"), _text(folder / "mtu"))


def _pcie(folder: Path) -> str:
    width, speed = _text(folder / "current_link_width"), _text(folder / "current_link_speed")
    return f"{width} lanes at {speed}" if width.isdigit() and speed else ""


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())[:MAX_DEVICES]
    except OSError:
        return []


def _text(path: Path, longest: int = MAX_VALUE) -> str:
    """A small file, cleaned line by line; empty where it is not there or the driver does not answer with text."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
    return "\n".join(clean(" ".join(line.split()), longest) for line in text.strip().splitlines())


def _process_text(proc: Path, pid: int, name: str) -> str:
    try:
        return read_bounded(proc / str(pid) / name, pid, MAX_FILE).decode("utf-8", "replace")
    except NcclwatchError:
        return ""


def _cpus(pid: int, proc: Path) -> str:
    return _first(_ALLOWED, _process_text(proc, pid, "status"))


def python_version(proc: Path, pid: int) -> str:
    """``3.11`` of the interpreter that a process maps; empty where it maps none."""
    try:
        text = read_bounded(proc / str(pid) / "maps", pid, 4 << 20).decode("utf-8", "replace")
    except NcclwatchError:
        return ""
    return _first(_PYTHON, text)


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""


def _word(text: str) -> str:
    return clean(text, 253)
