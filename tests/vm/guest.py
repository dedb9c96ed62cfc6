"""A QEMU guest for tests that need a kernel of their own: real RDMA devices, links that go down, traffic control.

The guest runs Debian's kernel under software emulation (no /dev/kvm needed, no root needed) and sees the host's root read-only
below an overlay, so everything installed on the host is there and nothing written in the guest reaches the host. One folder,
the *share*, is writable from both sides. The guest has no network but its own loopback and no clock guarantees: figures
measured inside are functional only.

As a program: ``python -m vm.guest [--timeout S] -- COMMAND …`` runs a command in the current folder inside the guest.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vm.errors import GuestError, GuestUnavailableError
from vm.initramfs import BOOT_MODULES, GUEST_MODULES, SHARE, Kernel, build, find_kernel

GUEST_VARIABLE = "NCCLWATCH_GUEST"
"""Set inside the guest, to the path of the share."""

FULL_VARIABLE = "NCCLWATCH_VM_FULL"
"""Set to run tests with every release of NCCL, not just one; handed on into the guest."""

CPU = "max,avx2=off"
"""All the emulator has but AVX2: with QEMU 7.2's, numpy sorts wrong (``argsort`` of a few small integers, one time in three)."""

KERNEL_OPTIONS = "quiet panic=-1 no_timer_check mitigations=off random.trust_cpu=on softlockup_panic=1 watchdog_thresh=20"
"""A processor that spins in the kernel for twice the watchdog's seconds (SoftRoCE's may, when a port goes down) ends the guest,
with the place on its console; otherwise every test after it would wait for its own end."""

_STATUS = "status"
_CONSOLE_TAIL = 80
_KERNEL_PLACE = re.compile(r"RIP: 0010:(\S.*)")
_ALARM = re.compile(r"\] (watchdog: BUG|BUG|Kernel panic|Out of memory)\b")


@dataclass(frozen=True, slots=True)
class System:
    """Whose root a guest runs on, and what emulates it: this host's own, or one of another architecture in a folder.

    ``folders`` of the host are seen read-only at the same places.
    """

    emulator: str = "qemu-system-x86_64"
    package: str = "qemu-system-x86"
    options: tuple[str, ...] = ("-cpu", CPU)
    console: str = "ttyS0"
    root: Path = Path("/")
    folders: tuple[Path, ...] = ()
    modules: tuple[str, ...] = BOOT_MODULES + GUEST_MODULES


@dataclass(frozen=True, slots=True)
class Machine:
    """Size of the guest: memory in MiB and number of emulated CPUs."""

    memory: int = 4096
    cpus: int = 2


class Guest:
    """One boot of the guest that runs one command and powers off.

    Use as a context manager: leaving it ends the emulator if it still runs and removes the share. ``share`` is the host's path
    of the folder that the guest sees at ``initramfs.SHARE``. ``on_line`` gets each line of the console as it comes.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        machine: Machine | None = None,
        system: System | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self._system = system or System()
        self._kernel, self._qemu, busybox = find_parts(self._system)
        self._machine = machine or Machine()
        self._on_line = on_line
        self._folder = Path(tempfile.mkdtemp(prefix="ncclwatch-guest-"))
        self.share = self._folder / "share"
        self.share.mkdir()
        self.console: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        (self._folder / "initramfs").write_bytes(build(self._kernel, busybox, self._system.folders))
        (self.share / "start").write_text(_start_script(command, cwd or Path.cwd(), environment or {}))

    def __enter__(self) -> Guest:
        self._process = subprocess.Popen(
            self._qemu_command(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read_console, name="guest-console", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None and self._reader is not None
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join(timeout=5)
        if self._process.stdout is not None:
            self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def running(self) -> bool:
        """Whether the emulator still runs."""
        return self._process is not None and self._process.poll() is None

    def wait(self, timeout: float) -> int:
        """Wait at most ``timeout`` seconds for the command and return its exit status.

        Raises GuestError when time runs out or the guest went down without leaving a status (panic, out of memory).
        """
        assert self._process is not None and self._reader is not None
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise GuestError(
                f"the guest was still running after {timeout:.0f} s; its console ends with:\n{self.tail()}"
            ) from None
        self._reader.join(timeout=5)
        status = self.status
        if status is None:
            raise GuestError(f"the guest went down without an exit status; its console ends with:\n{self.tail()}")
        return status

    @property
    def status(self) -> int | None:
        """The command's exit status; None while it runs, and where the guest went down before it ended."""
        try:
            return int((self.share / _STATUS).read_text())
        except (OSError, ValueError):
            return None

    def last_words(self) -> str:
        """What the guest's kernel said first of why it gave up, and where it stood, in one line."""
        said = [line.partition("] ")[2] for line in self.console if _ALARM.search(line)]
        where = [found[1] for line in self.console if (found := _KERNEL_PLACE.search(line))]
        return ", ".join([*said[:1], *(f"at {place}" for place in where[:1])]) or "nothing said"

    def tail(self) -> str:
        """The last lines of the console."""
        return "\n".join(self.console[-_CONSOLE_TAIL:])

    def _read_console(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self._process.stdout:
                text = line.rstrip("\r\n")
                self.console.append(text)
                if self._on_line is not None:
                    self._on_line(text)

    def _qemu_command(self) -> list[str]:
        shares = [("root", str(self._system.root), ",readonly=on"), ("share", str(self.share), "")]
        shares += [(f"folder{n}", str(folder), ",readonly=on") for n, folder in enumerate(self._system.folders)]
        filesystems = [
            f"local,path={path},mount_tag={tag},security_model=none,multidevs=remap{extra}" for tag, path, extra in shares
        ]
        return [
            str(self._qemu),
            *(
                "-accel",
                "tcg,thread=multi",
                *self._system.options,
                "-smp",
                str(self._machine.cpus),
                "-m",
                str(self._machine.memory),
            ),
            *("-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"),
            *("-kernel", str(self._kernel.image), "-initrd", str(self._folder / "initramfs")),
            *(word for filesystem in filesystems for word in ("-virtfs", filesystem)),
            *("-append", f"console={self._system.console} {KERNEL_OPTIONS}"),
        ]


def find_parts(system: System) -> tuple[Kernel, Path, Path]:
    """Kernel, emulator and busybox of a system.

    Raises GuestUnavailableError naming the Debian package that is missing.
    """
    qemu = shutil.which(system.emulator)
    if qemu is None:
        raise GuestUnavailableError(f"no {system.emulator}", system.package)
    busybox = shutil.which("busybox", path=os.pathsep.join(str(system.root / folder) for folder in ("bin", "usr/bin")))
    if busybox is None:
        raise GuestUnavailableError("no busybox", "busybox-static")
    kernel = find_kernel(system.root / "boot", system.root / "lib/modules", system.modules)
    return kernel, Path(qemu), Path(busybox)


def run(
    command: Sequence[str],
    *,
    timeout: float,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    machine: Machine | None = None,
    system: System | None = None,
    on_line: Callable[[str], None] | None = None,
) -> int:
    """Boot a guest, run ``command`` in it and return its exit status (see Guest)."""
    with Guest(command, cwd=cwd, environment=environment, machine=machine, system=system, on_line=on_line) as guest:
        return guest.wait(timeout)


def _start_script(command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> str:
    """What the guest runs as its first process. A fixed, small environment: the host's own would make runs differ."""
    fixed = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        GUEST_VARIABLE: SHARE,
        **environment,
    }
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in fixed.items())
    return f"""{exports}
hostname guest
ip link set lo up
ulimit -l unlimited
cd {shlex.quote(str(cwd))}
{shlex.join(command)} </dev/null
echo $? >{SHARE}/{_STATUS}.part && mv {SHARE}/{_STATUS}.part {SHARE}/{_STATUS}
sync
exec busybox poweroff -f
"""


def main() -> int:
    """Run a command in a guest and stream its console."""
    parser = argparse.ArgumentParser(description="Run a command in the QEMU guest, in the current folder.")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds, boot included")
    parser.add_argument("--memory", type=int, default=Machine().memory, help="MiB")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command")
    began = time.monotonic()
    try:
        status = run(
            command,
            timeout=options.timeout,
            machine=Machine(memory=options.memory),
            environment={name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
            on_line=lambda line: print(line, flush=True),
        )
    except GuestError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"guest: status {status} after {time.monotonic() - began:.1f} s", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
