"""The few bpf(2) and perf_event_open(2) operations that an agent needs, without BCC or libbpf in its memory.

Numbers and layouts are the kernel's user-space ABI (include/uapi/linux/bpf.h, perf_event.h), on x86-64 and aarch64. Everything
here is a thin wrapper over a descriptor: closing the descriptor undoes what it stands for, so nothing outlives the process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path

from ncclwatch.errors import NcclwatchError, PrivilegeError
from ncclwatch.target.machine import SYS_BPF, SYS_PERF_EVENT_OPEN, Machine, this_machine

_MACHINE = this_machine() or Machine.X86_64

BPF_PSEUDO_MAP_FD = 1
BPF_LD_IMM64 = 0x18
INSTRUCTION = 8
"""Bytes of one BPF instruction."""

_PERF_EVENT_IOC_ENABLE = 0x2400
_PERF_EVENT_IOC_SET_BPF = 0x40042408
_PERF_FLAG_FD_CLOEXEC = 8
_BPF_TRACE_UPROBE_MULTI = 48
_UPROBE_PMU = Path("/sys/bus/event_source/devices/uprobe/type")


class Command(IntEnum):
    """``enum bpf_cmd``."""

    MAP_CREATE = 0
    MAP_LOOKUP = 1
    MAP_UPDATE = 2
    MAP_DELETE = 3
    MAP_GET_NEXT_KEY = 4
    PROG_LOAD = 5
    RAW_TRACEPOINT_OPEN = 17
    LINK_CREATE = 28


class MapType(IntEnum):
    """``enum bpf_map_type``, as far as it is used."""

    HASH = 1
    ARRAY = 2
    PROG_ARRAY = 3
    PERCPU_HASH = 5
    PERCPU_ARRAY = 6
    LRU_HASH = 9
    RINGBUF = 27


class ProgramType(IntEnum):
    """``enum bpf_prog_type``, as far as it is used."""

    KPROBE = 2
    RAW_TRACEPOINT = 17


class BpfError(NcclwatchError):
    """The kernel refused a BPF object; ``errno`` is its reason."""

    def __init__(self, message: str, hint: str = "", errno_: int = 0) -> None:
        super().__init__(message, hint)
        self.errno = errno_


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: int | ctypes.Array[ctypes.c_char] | None) -> int:
    result: int = _libc().syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _bpf(command: Command, attributes: bytes) -> int:
    """One bpf(2) call; raises :class:`OSError`."""
    buffer = ctypes.create_string_buffer(attributes, max(len(attributes), 128))
    return _syscall(SYS_BPF[_MACHINE], ctypes.c_int(command).value, buffer, ctypes.c_uint(len(buffer)).value)


def refusal(what: str, error: OSError) -> NcclwatchError:
    """The error for people when the kernel refuses ``what``."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return PrivilegeError(
            f"the kernel does not allow to {what}",
            "run as root, or with CAP_BPF, CAP_PERFMON and CAP_SYS_ADMIN; in a container, with --privileged and --pid=host",
        )
    if error.errno == errno.ENOSYS:
        return BpfError(f"cannot {what}: this kernel has no BPF", "use a kernel built with CONFIG_BPF_SYSCALL", errno.ENOSYS)
    return BpfError(f"cannot {what}: {error.strerror}", "see ncclwatch doctor", error.errno or 0)


def raise_memlock_limit() -> None:
    """Before 5.11 BPF memory counts against RLIMIT_MEMLOCK: lift it; a refusal shows when the map is made."""
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (OSError, ValueError):
        return


@lru_cache(maxsize=1)
def possible_cpus() -> int:
    """How many CPUs the kernel reserves per-CPU values for (``/sys/devices/system/cpu/possible``)."""
    text = Path("/sys/devices/system/cpu/possible").read_text("ascii").strip()
    return max(int(part.rpartition("-")[2]) for part in text.split(",")) + 1


class BpfMap:
    """One BPF map; keys and values are raw bytes of the sizes given, per-CPU values as many as :func:`possible_cpus`."""

    def __init__(self, name: str, kind: MapType, key_size: int, value_size: int, entries: int, flags: int = 0) -> None:
        self.name = name
        self.kind = kind
        self.key_size = key_size
        self.entries = entries
        per_cpu = kind in (MapType.PERCPU_ARRAY, MapType.PERCPU_HASH)
        # The kernel rounds each CPU's value up to 8 bytes.
        self.value_size = (value_size + 7 & ~7) * possible_cpus() if per_cpu else value_size
        label = name.encode()[:15]
        attributes = struct.pack("<IIIIIIII16s", kind, key_size, value_size, entries, flags, 0, 0, 0, label)
        try:
            self.fd = _bpf(Command.MAP_CREATE, attributes)
        except OSError as error:
            raise refusal(f"create BPF map {name}", error) from None

    def _call(self, command: Command, key: bytes, value: ctypes.Array[ctypes.c_char] | None = None) -> None:
        if len(key) != self.key_size:
            raise ValueError(f"key of {len(key)} bytes for map {self.name} with keys of {self.key_size}")
        key_buffer = ctypes.create_string_buffer(key, len(key))
        address = ctypes.addressof(value) if value is not None else 0
        _bpf(command, struct.pack("<IIQQQ", self.fd, 0, ctypes.addressof(key_buffer), address, 0))

    def lookup(self, key: bytes) -> bytes | None:
        """The value at a key, or ``None``."""
        value = ctypes.create_string_buffer(self.value_size)
        try:
            self._call(Command.MAP_LOOKUP, key, value)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise refusal(f"read BPF map {self.name}", error) from None
        return value.raw

    def update(self, key: bytes, value: bytes) -> None:
        """Set the value at a key; raises :class:`BpfError` when the map is full."""
        if len(value) != self.value_size:
            raise ValueError(f"value of {len(value)} bytes for map {self.name} with values of {self.value_size}")
        try:
            self._call(Command.MAP_UPDATE, key, ctypes.create_string_buffer(value, len(value)))
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise BpfError(f"BPF map {self.name} is full: {self.entries} entries", "watch fewer processes") from None
            raise refusal(f"write BPF map {self.name}", error) from None

    def delete(self, key: bytes) -> bool:
        """Remove a key; whether it was there."""
        try:
            self._call(Command.MAP_DELETE, key)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return False
            raise refusal(f"write BPF map {self.name}", error) from None
        return True

    def keys(self) -> list[bytes]:
        """The keys of a hash map at this moment; one that changes meanwhile may miss or repeat some."""
        found: list[bytes] = []
        key: bytes | None = None
        while len(found) < self.entries:
            following = ctypes.create_string_buffer(self.key_size)
            start = ctypes.create_string_buffer(key, self.key_size) if key is not None else None
            begin = ctypes.addressof(start) if start is not None else 0
            try:
                _bpf(Command.MAP_GET_NEXT_KEY, struct.pack("<IIQQQ", self.fd, 0, begin, ctypes.addressof(following), 0))
            except OSError as error:
                if error.errno == errno.ENOENT:
                    break
                raise refusal(f"read BPF map {self.name}", error) from None
            key = following.raw
            found.append(key)
        return found

    def close(self) -> None:
        """Close the descriptor; safe to do twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True)
class Link:
    """An attachment: it lives as long as its descriptors."""

    fds: tuple[int, ...]

    def close(self) -> None:
        """Detach."""
        for fd in self.fds:
            os.close(fd)


def load_program(name: str, kind: ProgramType, instructions: bytes, *, multi: bool = False) -> int:
    """Load a program whose map references are already descriptors; returns its descriptor.

    ``multi`` prepares it for :func:`attach_uprobe_multi`. Raises :class:`PrivilegeError`, or :class:`BpfError` whose message ends
    with the verifier's last word.
    """
    code = ctypes.create_string_buffer(instructions, len(instructions))
    licence = ctypes.create_string_buffer(b"GPL")

    def attempt(log: ctypes.Array[ctypes.c_char] | None) -> int:
        attributes = struct.pack(
            "<IIQQIIQII16sII",
            kind,
            len(instructions) // INSTRUCTION,
            ctypes.addressof(code),
            ctypes.addressof(licence),
            1 if log is not None else 0,
            len(log) if log is not None else 0,
            ctypes.addressof(log) if log is not None else 0,
            0,
            0,
            name.encode()[:15],
            0,
            _BPF_TRACE_UPROBE_MULTI if multi else 0,
        )
        return _bpf(Command.PROG_LOAD, attributes)

    try:
        return attempt(None)
    except OSError as error:
        # The verifier answers EACCES and EINVAL for a program it rejects: ask again for its words.
        log = ctypes.create_string_buffer(1 << 20)
        try:
            return attempt(log)
        except OSError:
            words = log.value.decode("utf-8", "replace").strip().splitlines()
        if not words:
            raise refusal(f"load BPF program {name}", error) from None
        reason = next((line for line in reversed(words) if not line.startswith("processed ")), words[-1])
        raise BpfError(
            f"the kernel's verifier rejects {name}: {reason}", "report this with the output of uname -r", error.errno or 0
        ) from None


def attach_raw_tracepoint(name: str, program: int) -> Link:
    """Attach to a raw tracepoint (``sched_process_exec``)."""
    text = ctypes.create_string_buffer(name.encode())
    try:
        return Link((_bpf(Command.RAW_TRACEPOINT_OPEN, struct.pack("<QII", ctypes.addressof(text), program, 0)),))
    except OSError as error:
        raise refusal(f"attach to the tracepoint {name}", error) from None


def attach_uprobe_multi(program: int, path: str, sites: list[tuple[int, int]], *, pid: int = 0, on_return: bool = False) -> Link:
    """Attach one program to many places of one file (kernel 6.6 and later): for every process that maps it, or for ``pid`` alone.

    ``sites`` are (file offset, cookie). ``on_return`` as for :func:`attach_uprobe`. Raises :class:`OSError`: the caller knows
    what to try instead.
    """
    name = ctypes.create_string_buffer(os.fsencode(path))
    offsets = (ctypes.c_uint64 * len(sites))(*(offset for offset, _ in sites))
    cookies = (ctypes.c_uint64 * len(sites))(*(cookie for _, cookie in sites))
    attributes = struct.pack(
        "<IIIIQQQQIIII",
        program,
        0,
        _BPF_TRACE_UPROBE_MULTI,
        0,
        ctypes.addressof(name),
        ctypes.addressof(offsets),
        0,
        ctypes.addressof(cookies),
        len(sites),
        int(on_return),
        pid,
        0,
    )
    return Link((_bpf(Command.LINK_CREATE, attributes),))


def attach_uprobe(program: int, path: str, offset: int, *, pid: int = -1, on_return: bool = False) -> Link:
    """Attach a program to one place of a file through a perf event (any kernel).

    For every process that maps the file, or with ``pid`` for that one alone: the others then have no breakpoint. ``on_return``
    runs the program when the function that begins at ``offset`` returns; it must not be used on functions that block.
    """
    try:
        pmu = int(_UPROBE_PMU.read_text("ascii"))
    except OSError:
        raise BpfError("this kernel has no uprobes", "use a kernel built with CONFIG_UPROBE_EVENTS") from None
    name = ctypes.create_string_buffer(os.fsencode(path))
    # struct perf_event_attr, PERF_ATTR_SIZE_VER5: config1 is the path, config2 the offset of a uprobe.
    attributes = struct.pack("<IIQQQQQIIQQ", pmu, 112, int(on_return), 1, 0, 0, 0, 1, 0, ctypes.addressof(name), offset)
    buffer = ctypes.create_string_buffer(attributes, 112)
    try:
        fd = _syscall(SYS_PERF_EVENT_OPEN[_MACHINE], buffer, pid, 0 if pid < 0 else -1, -1, _PERF_FLAG_FD_CLOEXEC)
    except OSError as error:
        raise refusal(f"place a uprobe in {path}", error) from None
    try:
        fcntl.ioctl(fd, _PERF_EVENT_IOC_SET_BPF, program)
        fcntl.ioctl(fd, _PERF_EVENT_IOC_ENABLE, 0)
    except OSError as error:
        os.close(fd)
        raise refusal(f"run a BPF program at a uprobe in {path}", error) from None
    return Link((fd,))


def relocate(instructions: bytes, maps: dict[int, int], constants: dict[int, int] | None = None) -> bytes:
    """Put descriptors of maps and constants into a program.

    ``maps`` gives the descriptor for each map number the program names; ``constants`` replaces 64-bit immediates. Raises
    :class:`KeyError` for a map that is not given and :class:`ValueError` for a constant that is not in the program.
    """
    code = bytearray(instructions)
    missing = set(constants or ())
    position = 0
    while position < len(code):
        if code[position] != BPF_LD_IMM64:
            position += INSTRUCTION
            continue
        low, high = struct.unpack_from("<I", code, position + 4)[0], struct.unpack_from("<I", code, position + 12)[0]
        source = code[position + 1] >> 4
        if source == BPF_PSEUDO_MAP_FD:
            struct.pack_into("<I", code, position + 4, maps[low])
        elif constants and (value := low | high << 32) in constants:
            new = constants[value]
            struct.pack_into("<I", code, position + 4, new & 0xFFFFFFFF)
            struct.pack_into("<I", code, position + 12, new >> 32)
            missing.discard(value)
        position += 2 * INSTRUCTION
    if missing:
        raise ValueError("the program has no such constant")
    return bytes(code)
