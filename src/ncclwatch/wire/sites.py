"""From function pointers in a process to places in files where probes can be put."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncclwatch.errors import NcclwatchError
from ncclwatch.probes.instructions import CostClass, cost_class, whole_register
from ncclwatch.target.binary import NcclBinary
from ncclwatch.target.maps import Mapping, mapping_at
from ncclwatch.wire import abi
from ncclwatch.wire.contexts import CompletionQueue, QueuePair, VerbsContext

if TYPE_CHECKING:
    from ncclwatch.wire.taken import TakenSite

DATA_PATH = {
    "post_send": "on_post_send",
    "post_recv": "on_post_recv",
    "poll_cq": "on_poll",
}
"""Members of ``ibv_context_ops`` and the program at their entry."""

QP_EX_PROGRAMS = {
    name: f"on_{name}"
    for name in abi.QP_EX
    if name not in ("wr_complete",)  # what wr_start … build counts is already counted when it is built
}
CQ_EX_PROGRAMS = {"start_poll": "on_ex_poll", "next_poll": "on_ex_poll"}
RETURNS = {
    "poll_cq": "on_poll_return",
    "start_poll": "on_ex_poll_return",
    "next_poll": "on_ex_poll_return",
    "read_qp_num": "on_read_qp_num_return",
}
"""Members whose result is needed: the program at their return. These functions never block, so their frames are never among those
that somebody looks at in a hung process."""

POLLING = frozenset({"poll_cq", "start_poll", "next_poll", "read_qp_num"})
"""Members that are called to poll; the others post."""

TAKEN = "taken"
"""The role of a place where NCCL takes completions (:mod:`ncclwatch.wire.taken`): in place of those on polling."""

EXACT_RETURNS = {"post_send": "on_post_send_return"}
"""Likewise, only when counting exactly: a request that the provider refuses is rare, and its cost is one more trap a post."""


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """A place for a probe in one process: a file (as the kernel can open it), the offset in it in bytes, and the program for it.

    ``role`` is the member the function pointer came from (``post_send``); ``library`` is the path as the process sees it.
    ``cost`` is that of the probed instruction, which is the cheapest one at which the arguments are still where the caller put
    them.
    """

    pid: int
    inode: int
    offset: int
    program: str
    on_return: bool
    role: str
    path: str
    library: str
    cost: CostClass = CostClass.SINGLE_STEPPED
    places: int | None = None
    """What is filled into its program (:attr:`ncclwatch.wire.taken.TakenSite.places`)."""


def cheapest_entry(code: bytes, *, keep_stack: bool) -> tuple[int, CostClass]:
    """(bytes past the entry, cost) of the best instruction of a function's straight beginning to probe in place of its entry.

    A breakpoint costs twenty times more where the kernel must single-step the instruction than where it can emulate it, so the
    first one is taken that it emulates and before which no argument register has been written. ``keep_stack`` (for a probe on
    the return, which finds the return address at the stack pointer) also asks that nothing has been pushed. A function that
    jumps back into its beginning is probed at its entry, so that no call counts twice.
    """
    import capstone

    engine = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    engine.detail = True
    kept = ARGUMENT_REGISTERS | ({"rsp"} if keep_stack else frozenset())
    first: CostClass | None = None
    instructions = list(engine.disasm(code, _BASE))
    for instruction in instructions[:ENTRY_INSTRUCTIONS]:
        cost = cost_class(bytes(instruction.bytes))
        first = first or cost
        if cost is not CostClass.SINGLE_STEPPED:
            if any(_BASE < target <= instruction.address for target in _jump_targets(instructions)):
                break
            return instruction.address - _BASE, cost
        _, written = instruction.regs_access()
        names = set(map(whole_register, map(instruction.reg_name, written)))
        if names & kept or set(instruction.groups) & _LEAVES:
            break
    return 0, first or CostClass.SINGLE_STEPPED


ENTRY_INSTRUCTIONS = 16
_BASE = 1 << 16  # capstone writes small addresses in decimal
ENTRY_BYTES = 512
ARGUMENT_REGISTERS = frozenset({"rdi", "rsi", "rdx", "rcx"})
_LEAVES = frozenset({1, 2, 3, 7})
"""capstone's groups of jumps, calls, returns and relative branches: behind one of them the beginning is not straight any more."""


def _jump_targets(instructions: Iterable[Any]) -> list[int]:
    return [int(i.op_str, 16) for i in instructions if i.mnemonic.startswith("j") and i.op_str.startswith("0x")]


def _read_code(path: str, offset: int) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a path that only the kernel resolves
            return os.pread(file.fileno(), ENTRY_BYTES, offset)
    except OSError:
        return b""


def locate(pid: int, mappings: Sequence[Mapping], address: int) -> tuple[str, int, int, str] | None:
    """(path for the kernel, offset, inode, library) of a function of a process; ``None`` when no file backs it."""
    mapping = mapping_at(mappings, address)
    if mapping is None or not mapping.executable or not mapping.is_file:
        return None
    return openable_path(pid, mapping), address - mapping.start + mapping.offset, mapping.inode, mapping.file_path


def openable_path(pid: int, mapping: Mapping) -> str:
    """A path by which this process reaches a file that the target maps, also in another mount namespace or deleted.

    Through the target's root when that is still the same file, else through the mapping itself.
    """
    path = f"/proc/{pid}/root{mapping.file_path}"
    try:
        if not mapping.is_deleted and Path(path).stat().st_ino == mapping.inode:
            return path
    except OSError:
        pass
    return f"/proc/{pid}/map_files/{mapping.range_name}"


def data_path_sites(
    pid: int,
    mappings: Sequence[Mapping],
    contexts: Iterable[VerbsContext],
    pairs: Iterable[QueuePair] = (),
    queues: Iterable[CompletionQueue] = (),
    *,
    exact: bool = False,
) -> list[Site]:
    """Every place that must be probed to see the work requests of a process; each function once, however many queues share it."""
    pointers = [item for context in contexts for item in context.functions.items()]
    pointers += [item for pair in pairs for item in pair.extended]
    pointers += [item for queue in queues for item in queue.extended]
    entries = DATA_PATH | QP_EX_PROGRAMS | CQ_EX_PROGRAMS
    returns = RETURNS | (EXACT_RETURNS if exact else {})
    sites: list[Site] = []
    seen: set[tuple[int, int]] = set()
    for role, address in pointers:
        place = locate(pid, mappings, address)
        if place is None:
            continue
        path, offset, inode, library = place
        if (inode, offset) in seen:
            continue
        seen.add((inode, offset))
        # Both probes of a function sit on the same instruction: then a call costs one trap and its return another, not three.
        delta, cost = cheapest_entry(_read_code(path, offset), keep_stack=role in returns)
        for programs, on_return in ((entries, False), (returns, True)):
            if role in programs:
                sites.append(Site(pid, inode, offset + delta, programs[role], on_return, role, path, library, cost))
    return sorted(sites)


def taken_sites(pid: int, mappings: Sequence[Mapping], binaries: Iterable[NcclBinary]) -> list[Site]:
    """Where each NCCL of a process takes completions; none of one in whose code that place does not show."""
    sites = []
    for binary in binaries:
        for found in _places(binary):
            place = locate(pid, mappings, found.address + binary.bias)
            if place is not None:
                path, offset, inode, library = place
                sites.append(Site(pid, inode, offset, "on_taken", False, TAKEN, path, library, found.cost, found.places))
    return sites


def _places(binary: NcclBinary) -> list[TakenSite]:
    # Only the process that counts follows code; who samples does without.
    from ncclwatch.wire.taken import FUNCTION, MAX_CODE, taken_site

    try:
        with binary.open() as elf:
            found = (
                taken_site(elf.read_address(symbol.address, min(symbol.size, MAX_CODE)), symbol.address)
                for symbol in elf.symbols(FUNCTION).values()
            )
            return [site for site in found if site is not None]
    except NcclwatchError:
        return []


CONTROL_PATH = {
    "ibv_open_device": "on_open_device",
    "ibv_close_device": "on_close_device",
    "ibv_alloc_pd": "on_use_context",
    "ibv_create_cq": "on_use_context",
    "ibv_create_comp_channel": "on_use_context",
    "ibv_reg_mr": "on_use_pd",
    "ibv_reg_mr_iova": "on_use_pd",
    "ibv_reg_mr_iova2": "on_use_pd",
    "ibv_reg_dmabuf_mr": "on_use_pd",
    "ibv_create_qp": "on_create_qp",
    "ibv_modify_qp": "on_modify_qp",
    "ibv_destroy_qp": "on_destroy_qp",
}
"""Functions that libibverbs exports, and the program at their entry."""


def is_libibverbs(path: str) -> bool:
    """Whether a mapped file is libibverbs itself (not one of its providers)."""
    return os.path.basename(path).startswith("libibverbs.so")  # noqa: PTH119 - a path of another root
