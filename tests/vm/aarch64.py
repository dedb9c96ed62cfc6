"""The aarch64 guest: Debian's arm64 with its own kernel, emulated, with NCCL's aarch64 wheel and the CPU testbed built for it.

    make vm-aarch64                                   # builds what is missing, runs the tests below in one boot
    PYTHONPATH=src:tests python -m vm.aarch64 -- CMD  # any command there, in the project's folder

Everything is put together below ``.cache/aarch64`` and ``build/aarch64``: a root of Debian's packages, unpacked and not
configured (mmdebstrap, variant extract: no foreign code runs on the host), wheels of the pinned Python packages, NCCL. About
2 GiB. Root is needed for Debian's packages on the host alone (``packages-aarch64.txt``). Figures are functional only.

drgn has no wheel for aarch64, so layouts come from the manifest, by the library's build id.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ncclwatch.target.machine import Machine as Architecture
from testbed.job import ROOT
from vm.errors import GuestError, GuestUnavailableError
from vm.guest import Machine, System, run
from vm.initramfs import BOOT_MODULES

NCCL = "2.27.5"
CACHE = ROOT / ".cache" / "aarch64"
BUILD = ROOT / "build" / "aarch64"
SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
DEBIAN = (
    "bash", "busybox-static", "coreutils", "dash", "findutils", "grep", "hostname", "iproute2", "kmod", "libstdc++6",
    "linux-image-arm64", "mount", "procps", "python3", "python3-bpfcc", "sed", "util-linux",
)  # fmt: skip
PYTHON = (
    "annotated-doc", "annotated-types", "capstone", "click", "iniconfig", "linkify-it-py", "markdown-it-py", "mdit-py-plugins",
    "mdurl", "msgspec", "networkx", "numpy", "packaging", "perfetto", "platformdirs", "pluggy", "protobuf", "pydantic",
    "pydantic_core", "Pygments", "pyroute2", "pytest", "pytest-timeout", "pyzmq", "rich", "shellingham", "textual", "typer",
    "typing-inspection", "typing_extensions",
)  # fmt: skip
"""Of requirements.txt, what the tool and these tests import."""
TESTS = (
    "tests/unit/target/test_memory.py",
    "tests/unit/target/test_manifest.py",
    "tests/unit/target/test_lineflags.py",
    "tests/unit/probes/test_ring.py",
    f"tests/testbed/test_calls_nccl.py::test_23_all_reduces_in_23_records_out[{NCCL}-2]",
    f"tests/testbed/test_calls_nccl.py::test_the_making_and_the_end_of_a_communicator[{NCCL}]",
    f"tests/testbed/test_calls_nccl.py::test_every_kind_of_operation[{NCCL}-perf]",
    f"tests/testbed/test_diagnose_faults.py::test_the_rank_with_the_fault_is_named_and_nobody_else[{NCCL}-stuck-socket]",
)
"""Reading memory and rings; as many records of calls as calls, with the right arguments; a rank that does not move is named."""
TIMEOUT_S = 3600.0


def system() -> System:
    """The guest's root and emulator; raises GuestError where it cannot be put together."""
    root, site = CACHE / "root", CACHE / "site"
    _once(root, _make_root)
    _once(site, _make_site)
    _once(CACHE / "nccl" / NCCL, _make_nccl)
    _build_testbed()
    return System(
        emulator="qemu-system-aarch64",
        package="qemu-system-arm",
        options=("-M", "virt", "-cpu", "cortex-a72"),
        console="ttyAMA0",
        root=root,
        folders=(ROOT,),
        modules=BOOT_MODULES,
    )


def _once(folder: Path, make: object) -> None:
    """Make a folder whole or not at all."""
    assert callable(make)
    if folder.exists():
        return
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"==> {folder.relative_to(ROOT)}", flush=True)
    make(part)
    part.rename(folder)


def _make_root(folder: Path) -> None:
    """Debian's packages, unpacked; modules of the kernel listed as ``depmod`` does."""
    for tool in ("mmdebstrap", "depmod"):
        if shutil.which(tool) is None:
            raise GuestUnavailableError(f"no {tool}", {"depmod": "kmod"}.get(tool, tool))
    _run("mmdebstrap", "--quiet", "--arch=arm64", "--variant=extract", f"--include={','.join(DEBIAN)}", SUITE, folder, MIRROR)
    for modules in (folder / "lib" / "modules").iterdir():
        _run("depmod", "-b", folder, modules.name)
    _compile(folder / "usr" / "lib" / "python3.11", folder / "usr" / "lib" / "python3" / "dist-packages")


def _compile(*folders: Path) -> None:
    """Python's bytecode is the same on every architecture; emulated, compiling takes minutes."""
    _run("/usr/bin/python3", "-m", "compileall", "-q", "-j", "2", "-x", "lib2to3|/test/", *folders)


def _make_site(folder: Path) -> None:
    """The pinned Python packages as wheels for aarch64."""
    names = {name.lower() for name in PYTHON}
    pins = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    wanted = [pin for pin in pins if pin.partition("==")[0].lower() in names]
    tags = (f"manylinux{tag}_{Architecture.AARCH64}" for tag in ("2014", "_2_17", "_2_26", "_2_27", "_2_28"))
    platforms = [word for tag in tags for word in ("--platform", tag)]
    interpreter = ("--implementation", "cp", "--python-version", "3.11", "--abi", "cp311", "--abi", "abi3", "--abi", "none")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:")
    _run(*pip, *interpreter, *platforms, "--target", folder, *wanted)


def _make_nccl(folder: Path) -> None:
    _run(sys.executable, ROOT / "scripts" / "fetch_nccl.py", NCCL, folder, Architecture.AARCH64)


def _build_testbed() -> None:
    compilers = ("CC=aarch64-linux-gnu-gcc", "CXX=aarch64-linux-gnu-g++", "ARCH=")
    if shutil.which("aarch64-linux-gnu-g++") is None:
        raise GuestUnavailableError("no compiler for aarch64", "g++-aarch64-linux-gnu")
    folders = (f"NCCL_CACHE={CACHE / 'nccl'}", f"BUILD={BUILD}", f"PYTHON={sys.executable}", f"VERSIONS={NCCL}")
    _run("make", "-s", "-C", ROOT / "tests" / "testbed", *folders, *compilers)


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise GuestError(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def run_there(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> int:
    """Run a command in the guest, in the project's folder; returns its exit status."""
    environment = {
        "PYTHONPATH": f"src:tests:{CACHE / 'site'}",
        "NCCL_CACHE": str(CACHE / "nccl"),
        "TESTBED_BUILD": str(BUILD),
        "PYTHONDONTWRITEBYTECODE": "1",
        # The release that is here runs in each test; the guest takes whatever time it needs.
        "NCCLWATCH_ALL": "1",
    }
    _compile(ROOT / "src", ROOT / "tests")
    began = time.monotonic()
    return run(
        command,
        timeout=timeout_s,
        cwd=ROOT,
        environment=environment,
        machine=Machine(),
        system=system(),
        on_line=lambda line: print(f"{time.monotonic() - began:7.1f} {line}", flush=True),
    )


def main() -> int:
    """Run the tests, or a command, in the guest and stream its console."""
    parser = argparse.ArgumentParser(description="Run the tests, or a command, in the emulated aarch64 guest.")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds, boot included")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    pytest = ["python3", "-m", "pytest", "-p", "no:cacheprovider", "-o", "timeout=1200", "-q", *TESTS]
    try:
        return run_there(command or pytest, options.timeout)
    except GuestError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
