#!/usr/bin/env python3
"""Make the manifest of NCCL layouts from the wheels on PyPI.

For every release of the packages below from 2.18 on, for x86-64 and aarch64: download the wheel with pip, extract the layout of
its libnccl, delete it. Writes src/ncclwatch/target/data/layouts.json.xz. Takes about 3 s a wheel and the download (100-300 MB).

    scripts/make_layout_manifest.py                    # everything
    scripts/make_layout_manifest.py --new              # only releases that the committed file does not have yet
    scripts/make_layout_manifest.py --keep DIR         # keep the libraries in DIR and use those that are there already
    scripts/make_layout_manifest.py --check --keep DIR # extract again and compare with the committed file
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from itertools import product
from pathlib import Path

from ncclwatch.target import dwarf, manifest
from ncclwatch.target.elf import ElfFile
from ncclwatch.target.machine import Machine
from ncclwatch.target.manifest import Entry
from ncclwatch.target.version import find_version

PACKAGES = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
FIRST = (2, 18)
MEMBER = re.compile(r"nvidia/nccl/lib/libnccl\.so(\.\d+)*")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
TARGET = Path(__file__).resolve().parents[1] / "src" / "ncclwatch" / "target" / "data" / manifest.FILE_NAME


def platforms(machine: Machine) -> list[str]:
    """pip's options for wheels of an architecture, whatever this machine's is."""
    tags = (f"manylinux{tag}_{machine}" for tag in ("2014", "_2_17", "_2_18", "_2_28"))
    return ["--only-binary=:all:", *(option for tag in tags for option in ("--platform", tag))]


def releases(package: str, machine: Machine) -> list[str]:
    """The package's versions from 2.18 on, oldest first."""
    command = [*PIP, "index", "versions", *platforms(machine), package]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode and "No matching distribution" in result.stderr:
        return []  # no wheel for this architecture
    output = result.stdout
    found = re.search(r"Available versions: (.*)", output)
    if not found:
        raise SystemExit(f"pip lists no versions of {package}")
    return sorted((version for version in found[1].split(", ") if numbers(version) >= FIRST), key=numbers)


def numbers(version: str) -> tuple[int, ...]:
    """``2.26.2.post1`` → (2, 26, 2, 1): good enough to sort NCCL's versions."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def fetch(package: str, version: str, machine: Machine, folder: Path) -> Path:
    """The libnccl of one wheel in ``folder``; downloaded unless it is there."""
    library = folder / f"{package}-{version}-{machine}" / "libnccl.so.2"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        download = [
            "download",
            "--quiet",
            "--no-deps",
            "--no-cache-dir",
            *platforms(machine),
            "--dest",
            wheels,
            f"{package}=={version}",
        ]
        subprocess.run([*PIP, *download], check=True)
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if MEMBER.fullmatch(name)]
            library.parent.mkdir(exist_ok=True)
            part = library.with_suffix(".part")
            with archive.open(member) as source, part.open("wb") as target:
                while chunk := source.read(1 << 22):
                    target.write(chunk)
            part.rename(library)
    return library


def entry_of(library: Path, package: str, machine: Machine) -> Entry:
    """What the libnccl of a wheel says."""
    with ElfFile.open(library) as elf:
        version = find_version(elf)
        if version is None:
            raise SystemExit(f"{library}: no NCCL version in it")
        if elf.architecture is not machine:
            raise SystemExit(f"{library}: not for {machine}")
        return Entry(dwarf.extract(elf, version.number), version.cuda, package, machine)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="folder to keep the libraries in (about 15 GB)")
    parser.add_argument("--check", action="store_true", help="compare with the committed file instead of writing it")
    parser.add_argument("--new", action="store_true", help="take from the committed file what it has, and add the rest")
    options = parser.parse_args()
    entries = list(manifest.load().entries()) if options.new else []
    there = {(entry.package, entry.machine) for entry in entries}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for machine, package in product(Machine, PACKAGES):
            for version in releases(package, machine):
                name = f"{package}=={version}"
                if (name, machine) in there:
                    continue
                library = fetch(package, version, machine, folder)
                entries.append(entry_of(library, name, machine))
                layout = entries[-1].layout
                print(f"{name} {machine}: {len(layout.structs)} structures, {len(layout.symbols)} symbols", flush=True)
                if not options.keep:
                    library.unlink()
    data = manifest.build_manifest(
        sorted(entries, key=lambda entry: (entry.machine, entry.package.split("==")[0], numbers(entry.package.split("==")[1])))
    )
    packed = manifest.compress(data)
    if options.check:
        same = TARGET.read_bytes() == packed
        print("the committed file is up to date" if same else f"{TARGET.name} differs from what the wheels say")
        return 0 if same else 1
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_bytes(packed)
    size = len(json.dumps(data))
    print(
        f"{TARGET.name}: {len(data['builds'])} builds, {len(data['structs'])} structures, {len(packed)} bytes ({size} unpacked)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
