"""What the machine, its kernel and our privileges allow. Every check reads a file or two and never changes anything.

``root`` is where the machine's file system lies: ``/``, or a made-up one in tests.
"""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

from ncclwatch.cli.findings import Finding, Level
from ncclwatch.target.machine import this_machine

MINIMUM_KERNEL = (5, 8)
"""The first kernel with the BPF ring buffer (commit 457f44363a88)."""

# Bits of CapEff, include/uapi/linux/capability.h.
CAPABILITIES = {"CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_PERFMON": 38, "CAP_BPF": 39}


def host_findings(root: Path = Path("/")) -> Iterator[Finding]:
    """All checks of the machine, in the order in which a person should mend them."""
    from ncclwatch.messaging.privileges import uprobes_without_admin

    yield machine(platform.machine(), platform.release())
    yield from privileges(root)
    yield agent_privileges(effective_capabilities(root), uprobes_without_admin)
    yield ptrace_scope(root)
    yield lockdown(root)
    yield from tracing(root)
    yield from bpf_settings(root)
    yield memlock()
    yield bcc_module()
    yield drgn_module()
    yield py_spy()
    yield namespaces(root)
    yield rdma(root)


def read(root: Path, path: str) -> str | None:
    """A small text file of the kernel, stripped; ``None`` when there is none or it is closed to us."""
    try:
        with (root / path).open("rb") as file:
            return file.read(65536).decode("utf-8", "replace").strip()
    except OSError:
        return None


def machine(architecture: str, release: str) -> Finding:
    """An architecture that can be read, and a kernel that has the BPF ring buffer."""
    found = re.match(r"(\d+)\.(\d+)", release)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    detail = f"Linux {release} on {architecture}"
    data = {"release": release, "machine": architecture}
    if this_machine(architecture) is None:
        return Finding("kernel", Level.MISSING, detail, "ncclwatch reads x86-64 and aarch64 processes only", data)
    if version < MINIMUM_KERNEL:
        return Finding(
            "kernel", Level.MISSING, detail, "tracing calls needs Linux 5.8 or later; 'dump' and 'diagnose' still work", data
        )
    return Finding("kernel", Level.OK, detail, data=data)


def effective_capabilities(root: Path) -> set[str] | None:
    """Names of the capabilities in ``CapEff`` among those that matter; ``None`` when it cannot be read."""
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", read(root, "proc/self/status") or "", re.MULTILINE)
    if not found:
        return None
    bits = int(found[1], 16)
    return {name for name, bit in CAPABILITIES.items() if bits >> bit & 1}


def privileges(root: Path) -> Iterator[Finding]:
    """Capabilities for reading other processes' memory, and for uprobes and BPF."""
    held = effective_capabilities(root)
    if held is None:
        yield Finding("privileges", Level.GAP, "capabilities cannot be read from /proc/self/status", "mount /proc")
        return
    data = {"effective": sorted(held)}
    names = ", ".join(sorted(held)) or "none of those that matter"
    if "CAP_SYS_PTRACE" in held:
        yield Finding("read memory", Level.OK, f"effective capabilities: {names}", data=data)
    else:
        hint = "run as root, or with CAP_SYS_PTRACE, or as the user of the job with yama's ptrace_scope 0"
        yield Finding("read memory", Level.MISSING, "CAP_SYS_PTRACE is missing", hint, data)
    if "CAP_SYS_ADMIN" in held:
        yield Finding("trace calls", Level.OK, "CAP_SYS_ADMIN is held", data=data)
    else:
        # Since the 2025 stable kernels perf-based uprobes need CAP_SYS_ADMIN; CAP_BPF with CAP_PERFMON no longer suffices.
        hint = "run as root or with CAP_SYS_ADMIN; without it 'attach' shows what NCCL's memory tells, but no calls"
        yield Finding("trace calls", Level.MISSING, "CAP_SYS_ADMIN is missing", hint, data)
    uid_map = (read(root, "proc/self/uid_map") or "").split()
    if uid_map and uid_map[:3] != ["0", "0", "4294967295"]:
        hint = "run ncclwatch outside the user namespace (a privileged container, or the host)"
        yield Finding("user namespace", Level.GAP, "capabilities hold inside a user namespace only", hint)


def agent_privileges(held: set[str] | None, uprobes: Callable[[], bool]) -> Finding:
    """What 'ncclwatch agent' would keep once started; ``uprobes`` tries whether they open without CAP_SYS_ADMIN."""
    from ncclwatch.messaging.privileges import KEPT

    if not held or "CAP_SYS_PTRACE" not in held:
        hint = f"start it as root, or with {', '.join(name.removeprefix('CAP_') for name in KEPT)}"
        return Finding("agent", Level.GAP, "an agent started like this cannot read other users' processes", hint)
    admin = "CAP_SYS_ADMIN" in held and not uprobes()
    kept = [*KEPT, *(["CAP_SYS_ADMIN"] if admin else [])]
    names = ", ".join(name.removeprefix("CAP_") for name in kept)
    why = "; this kernel wants SYS_ADMIN for uprobes" if admin else ""
    return Finding("agent", Level.OK, f"keeps {names} and drops the rest{why}", data={"kept": kept})


def ptrace_scope(root: Path) -> Finding:
    """Yama's restriction of reading other processes."""
    scope = read(root, "proc/sys/kernel/yama/ptrace_scope")
    if scope is None:
        return Finding("yama", Level.OK, "ptrace_scope is not restricted (no yama)")
    data = {"ptrace_scope": scope}
    if scope == "3":
        hint = "boot without kernel.yama.ptrace_scope=3; it cannot be lowered at run time"
        return Finding("yama", Level.MISSING, "ptrace_scope is 3: nobody may read another process", hint, data)
    if scope in ("1", "2") and "CAP_SYS_PTRACE" not in (effective_capabilities(root) or set()):
        hint = "run with CAP_SYS_PTRACE, or 'sysctl kernel.yama.ptrace_scope=0'"
        return Finding("yama", Level.MISSING, f"ptrace_scope is {scope}", hint, data)
    return Finding("yama", Level.OK, f"ptrace_scope is {scope}, which does not bind CAP_SYS_PTRACE", data=data)


def lockdown(root: Path) -> Finding:
    """Kernel lockdown; ``confidentiality`` forbids BPF to read memory."""
    text = read(root, "sys/kernel/security/lockdown")
    mode = re.search(r"\[(\w+)\]", text or "")
    current = mode[1] if mode else "none"
    if current == "confidentiality":
        hint = "boot with lockdown=integrity or none; 'dump' and 'diagnose' still work"
        return Finding("lockdown", Level.GAP, "mode confidentiality forbids BPF to read memory", hint, {"lockdown": current})
    return Finding("lockdown", Level.OK, f"mode {current}", data={"lockdown": current})


def tracing(root: Path) -> Iterator[Finding]:
    """Uprobes: the perf event source; tracefs is for other tools."""
    pmu = read(root, "sys/bus/event_source/devices/uprobe/type")
    if pmu is None:
        hint = "a kernel with CONFIG_UPROBE_EVENTS is needed to trace calls; 'dump' and 'diagnose' still work"
        yield Finding("uprobes", Level.GAP, "the kernel offers no uprobe event source", hint)
    else:
        yield Finding("uprobes", Level.OK, f"perf event source of type {pmu}", data={"type": pmu})
    for place in ("sys/kernel/tracing", "sys/kernel/debug/tracing"):
        if (root / place / "uprobe_events").exists():
            yield Finding("tracefs", Level.OK, f"mounted at /{place}", data={"path": f"/{place}"})
            return
    yield Finding("tracefs", Level.INFO, "not mounted (probes are placed without it)")


def bpf_settings(root: Path) -> Iterator[Finding]:
    """Kernel settings around BPF and perf: facts for a report, gaps only where they bind us."""
    btf = (root / "sys/kernel/btf/vmlinux").exists()
    yield Finding(
        "BTF", Level.OK if btf else Level.INFO, "present" if btf else "none (not needed for uprobes)", data={"present": btf}
    )
    admin = "CAP_SYS_ADMIN" in (effective_capabilities(root) or set())
    for name, path, limit in (
        ("unprivileged BPF", "proc/sys/kernel/unprivileged_bpf_disabled", 0),
        ("perf events", "proc/sys/kernel/perf_event_paranoid", 1),
    ):
        value = read(root, path)
        if value is None:
            continue
        key = path.rpartition("/")[2]
        binding = value.lstrip("-").isdigit() and int(value) > limit and not admin
        detail = f"{key} is {value}" + ("" if binding else ", which does not bind us" if int(admin) else "")
        hint = "run with CAP_SYS_ADMIN" if binding else ""
        yield Finding(name, Level.GAP if binding else Level.OK, detail, hint, {key: value})


def memlock() -> Finding:
    """Locked memory: kernels before 5.11 charge BPF maps and the ring to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    data = {"soft": soft, "hard": hard}
    kernel = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    if kernel < (5, 11) and soft != resource.RLIM_INFINITY and soft < 64 << 20 and os.geteuid() != 0:
        return Finding("locked memory", Level.GAP, f"limit is {shown}", "raise it: ulimit -l unlimited", data)
    return Finding("locked memory", Level.OK, f"limit is {shown}", data=data)


def bcc_module() -> Finding:
    """Debian's BCC, and not the unrelated package of that name on PyPI."""
    try:
        import bcc
    except Exception as error:  # a broken libbcc raises OSError, AttributeError and more
        hint = "apt-get install python3-bpfcc, and run ncclwatch with a Python that sees it (a venv with --system-site-packages)"
        return Finding("BCC", Level.MISSING, f"cannot be imported: {type(error).__name__}: {error}"[:200], hint)
    path = str(getattr(bcc, "__file__", "?"))
    if not hasattr(bcc, "BPF"):
        hint = "pip uninstall bcc; apt-get install python3-bpfcc"
        return Finding("BCC", Level.MISSING, f"{path} is PyPI's unrelated package 'bcc'", hint)
    version = str(getattr(bcc, "__version__", "?"))
    return Finding("BCC", Level.OK, f"version {version} at {path}", data={"version": version, "path": path})


def drgn_module() -> Finding:
    """drgn, which reads layouts from debug information."""
    try:
        import drgn
    except ImportError as error:
        hint = "pip install drgn; without it only NCCL builds of known releases can be read"
        return Finding("drgn", Level.GAP, f"cannot be imported: {error}"[:200], hint)
    version = str(getattr(drgn, "__version__", "?"))
    return Finding("drgn", Level.OK, f"version {version}", data={"version": version})


def py_spy() -> Finding:
    """Whether Python frames of ranks can be read; without, only the kernel tells what they do."""
    from ncclwatch.target.python_stack import GET, NEWEST, program

    path = program()
    if path is None:
        return Finding("py-spy", Level.GAP, "not found: Python frames of ranks are not seen", GET)
    newest = ".".join(map(str, NEWEST))
    return Finding("py-spy", Level.OK, f"{path}: frames of Python up to {newest}", data={"path": path})


def namespaces(root: Path) -> Finding:
    """Whether ncclwatch itself runs in a nested pid namespace, and so sees only its own container's processes."""
    found = re.search(r"^NSpid:\s*(.+)$", read(root, "proc/self/status") or "", re.MULTILINE)
    pids = found[1].split() if found else []
    init = read(root, "proc/1/comm") or "?"
    detail = f"pid 1 is '{init}'"
    if len(pids) > 1:
        hint = "run on the host, or with the host's pid namespace, to see processes of other containers"
        return Finding("pid namespace", Level.INFO, f"nested {len(pids) - 1} deep, {detail}", hint, {"nspid": pids})
    return Finding("pid namespace", Level.OK, detail, data={"nspid": pids})


def rdma(root: Path) -> Finding:
    """RDMA devices and their ports' states."""
    devices = []
    folder = root / "sys/class/infiniband"
    for device in sorted(folder.iterdir())[:64] if folder.is_dir() else []:
        for port in sorted((device / "ports").iterdir())[:8] if (device / "ports").is_dir() else []:
            state = (read(root, str(port.relative_to(root) / "state")) or "?").partition(":")[2].strip() or "?"
            rate = read(root, str(port.relative_to(root) / "rate")) or ""
            devices.append({"device": device.name, "port": port.name, "state": state, "rate": rate})
    if not devices:
        return Finding(
            "RDMA",
            Level.INFO,
            "no device in /sys/class/infiniband: NCCL runs over sockets or inside the node",
            data={"ports": []},
        )
    shown = ", ".join(f"{d['device']}/{d['port']} {d['state']} {d['rate']}".strip() for d in devices)
    down = [d for d in devices if d["state"] != "ACTIVE"]
    hint = f"check {', '.join(d['device'] + '/' + d['port'] for d in down)}" if down else ""
    return Finding("RDMA", Level.GAP if down else Level.OK, shown, hint, {"ports": devices})
