"""The guest's initial file system: busybox, the modules that reach the host's root, and a script that switches to it."""

from __future__ import annotations

import lzma
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from vm.errors import GuestUnavailableError

BOOT_MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
"""What the initial file system loads itself; their dependencies come from ``modules.dep``."""

GUEST_MODULES = ("rdma_rxe", "ib_uverbs", "sch_netem", "sch_tbf")
"""What tests load later from the host's /lib/modules; a kernel without them is not chosen."""

SHARE = "/run/guest"
"""Where the guest sees the folder it exchanges files through."""

INIT = f"""#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc none /proc; mount -t sysfs none /sys; mount -t devtmpfs none /dev
die() {{ echo "guest: $1"; poweroff -f; }}
for module in $(cat /modules.order); do insmod /modules/$module || die "cannot load $module"; done
mkdir -p /lower /upper /root
mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=loose,ro root /lower || die "cannot mount the host's root"
mount -t tmpfs none /upper; mkdir /upper/data /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work overlay /root || die "cannot mount the overlay"
cd /root
mount -t proc none proc; mount -t sysfs none sys; mount -t devtmpfs none dev
mkdir -p dev/shm dev/pts
mount -t tmpfs none dev/shm; mount -t devpts none dev/pts; mount -t tmpfs none run
mkdir .{SHARE}
while read tag folder; do
  mkdir -p ./$folder
  mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=loose,ro $tag ./$folder || die "cannot mount $folder"
done </folders
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=none share .{SHARE} || die "cannot mount the share"
mount -t tracefs none sys/kernel/tracing; mount -t debugfs none sys/kernel/debug
cd /
exec switch_root /root /bin/sh {SHARE}/start
"""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An installed kernel: ``image`` is its bzImage, ``modules`` its folder below /lib/modules."""

    version: str
    image: Path
    modules: Path

    def dependencies(self) -> dict[str, tuple[str, ...]]:
        """Module name → its file and the files it needs, nearest first, relative to ``modules`` (``modules.dep``)."""
        table: dict[str, tuple[str, ...]] = {}
        for line in (self.modules / "modules.dep").read_text().splitlines():
            path, _, needs = line.partition(":")
            table[Path(path).name.split(".")[0]] = (path, *needs.split())
        return table


def find_kernel(boot: Path, modules: Path, needed: Collection[str]) -> Kernel:
    """The newest installed kernel that has every module that is needed.

    Raises GuestUnavailableError when there is none.
    """
    for image in sorted(boot.glob("vmlinuz-*"), key=_version_key, reverse=True):
        version = image.name.removeprefix("vmlinuz-")
        kernel = Kernel(version, image, modules / version)
        if (kernel.modules / "modules.dep").exists() and set(needed) <= kernel.dependencies().keys():
            return kernel
    raise GuestUnavailableError(f"no kernel in {boot} with modules {', '.join(needed)}", "linux-image-amd64")


def _version_key(path: Path) -> tuple[int, ...]:
    """Numbers of a kernel's file name, so that 6.10 is newer than 6.9."""
    digits = "".join(c if c.isdigit() else " " for c in path.name)
    return tuple(int(word) for word in digits.split())


def load_order(kernel: Kernel) -> list[str]:
    """Module files (relative to ``kernel.modules``) in an order in which insmod accepts them."""
    table = kernel.dependencies()
    order: list[str] = []

    def add(path: str) -> None:
        for need in table[Path(path).name.split(".")[0]][1:]:
            add(need)
        if path not in order:
            order.append(path)

    for name in BOOT_MODULES:
        add(table[name][0])
    return order


def build(kernel: Kernel, busybox: Path, folders: Sequence[Path] = ()) -> bytes:
    """The archive the kernel unpacks into its first root (cpio, format "newc", not compressed); it mounts ``folders`` as well."""
    archive = _Archive()
    for folder in ("bin", "proc", "sys", "dev", "modules"):
        archive.add(folder, stat.S_IFDIR | 0o755)
    archive.add("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes())
    order = load_order(kernel)
    for path in order:
        archive.add(f"modules/{_plain_name(path)}", stat.S_IFREG | 0o644, _module_bytes(kernel.modules / path))
    archive.add("modules.order", stat.S_IFREG | 0o644, "\n".join(map(_plain_name, order)).encode())
    listed = "".join(f"folder{n} {folder}\n" for n, folder in enumerate(folders))
    archive.add("folders", stat.S_IFREG | 0o644, listed.encode())
    archive.add("init", stat.S_IFREG | 0o755, INIT.encode())
    return archive.finish()


def _plain_name(path: str) -> str:
    return Path(path).name.split(".")[0] + ".ko"


def _module_bytes(path: Path) -> bytes:
    """A module as busybox can load it: Debian 13 and later compress modules with xz."""
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


class _Archive:
    """A writer of cpio's "newc" format (kernel, Documentation/driver-api/early-userspace/buffer-format.rst)."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._inode = 0

    def add(self, name: str, mode: int, data: bytes = b"") -> None:
        self._inode += 1
        encoded = name.encode() + b"\0"
        fields = (self._inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields)
        self._parts.append(_pad4(header + encoded) + _pad4(data))

    def finish(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return b"".join(self._parts)


def _pad4(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
