"""The counter shim as a file: where its library lies, how it is built, and how a job is told to load it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ncclwatch.errors import TargetError, UsageError

LIBRARY = "libncclwatch_counters.so"
FIRST_PLUGIN = (2, 23)
"""NCCL has a profiler plugin interface from here on (src/misc/profiler.cc, v2.23.4-1)."""

FIRST_KERNELS = (2, 26)
"""The interface reports kernels from here on (src/transport/profiler.cc, v2.26.2-1)."""

_BUILD_LIMIT_S = 120


@dataclass(frozen=True, slots=True)
class Setting:
    """One environment variable for the job's processes, and what it is for."""

    name: str
    value: str
    purpose: str


def source_folder() -> Path | None:
    """The shim's sources: beside an installed package, or of a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_shim", package.parent.parent / "kernel_counters"):
        if (folder / "frame.h").exists():
            return folder
    return None


def built_library() -> Path | None:
    """The library, where it has been built."""
    source = source_folder()
    folders = [cache_folder()]
    if source is not None:
        folders[:0] = [source, source.parent / "build" / "shim"]
    return next((folder / LIBRARY for folder in folders if (folder / LIBRARY).is_file()), None)


def cache_folder() -> Path:
    """Where a user's own build goes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ncclwatch"


def build(folder: Path | None = None) -> Path:
    """Build the library into ``folder`` (the user's cache without one); needs make and a C compiler, no CUDA."""
    source, folder = source_folder(), folder or cache_folder()
    if source is None:
        raise TargetError(
            "this installation holds no sources of the counter shim", "install ncclwatch from its wheel or repository"
        )
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None or shutil.which("make") is None:
        raise TargetError("the counter shim needs make and a C compiler", "install gcc and make, or build it elsewhere")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        command = ["make", "-s", "-C", str(source), f"OUT={folder.resolve()}", f"CC={compiler}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_BUILD_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"cannot build the counter shim in {folder}: {error}", "name another folder with --build") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["make failed"])[-1]
        raise TargetError(f"building the counter shim failed: {last}", "is the compiler complete?")
    return folder / LIBRARY


def settings(library: Path, version: tuple[int, int, int] | None) -> tuple[Setting, ...]:
    """What a job with this NCCL needs in its environment; for an unknown version what serves every one."""
    path = str(library)
    if version is not None and version[:2] >= FIRST_PLUGIN:
        kernels = "" if version[:2] >= FIRST_KERNELS else " (this NCCL reports no kernels to it)"
        return (Setting("NCCL_PROFILER_PLUGIN", path, f"NCCL loads the shim as its profiler plugin{kernels}"),)
    preload = Setting("LD_PRELOAD", path, "calls of NCCL's functions pass through the shim")
    if version is not None:
        injected = Setting(
            "CUDA_INJECTION64_PATH", path, "the CUDA driver loads it: counters in GPU memory are read from the start"
        )
        return (preload, injected)
    return (Setting("NCCL_PROFILER_PLUGIN", path, "for NCCL 2.23 and later"), preload)
