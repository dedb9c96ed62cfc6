"""Instructions of a function, and what the kernel does with a uprobe on each: by architecture.

Where from: ``arch/x86/kernel/uprobes.c``, ``branch_setup_ops`` and ``push_setup_ops`` (Linux 5.8 to 6.18);
``arch/arm64/kernel/probes/decode-insn.c``, ``arm_probe_decode_insn``, and ``arch/arm64/lib/insn.c`` (Linux 5.8 to 6.18).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from ncclwatch.target.machine import Machine

_ENDBR64 = b"\xf3\x0f\x1e\xfa"
_NOP5 = b"\x0f\x1f\x44\x00\x00"


class CostClass(StrEnum):
    """How the kernel steps over the probed instruction; it decides what a hit costs."""

    EMULATED = "emulated"
    OPTIMISED = "optimised"
    SINGLE_STEPPED = "single-stepped"
    REFUSED = "refused"
    """The kernel takes no probe there."""

    @property
    def typical_ns(self) -> int:
        """What a hit that writes a record costs in ns on a virtual machine with x86-64, where traps cost most; 0 of none.

        Measured by tests/benchmarks/bench_probe_hit.py on Linux 6.18; on bare metal expect a third or less.
        """
        return {CostClass.EMULATED: 1060, CostClass.OPTIMISED: 820, CostClass.SINGLE_STEPPED: 10700, CostClass.REFUSED: 0}[self]


def disassemble(machine: Machine, code: bytes, address: int) -> list[Any]:
    """The instructions of a stretch of code that begins at ``address``, as far as they decode."""
    # capstone takes 10 MB: only who looks for sites pays for it.
    import capstone

    kind = (capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    if machine is Machine.AARCH64:
        kind = (capstone.CS_ARCH_ARM64, capstone.CS_MODE_LITTLE_ENDIAN)
    engine = capstone.Cs(*kind)
    engine.detail = False
    return list(engine.disasm(code, address))


def entry_of(machine: Machine, code: list[Any]) -> Any:
    """The first instruction to probe at: behind x86's ``endbr64`` nothing has changed yet, and what follows is mostly a push,
    which costs a twentieth. ``code`` is not empty.
    """
    return code[1] if machine is Machine.X86_64 and code[0].bytes == _ENDBR64 and len(code) > 1 else code[0]


def is_return(instruction: Any) -> bool:
    """Whether a function ends here. One that checks a signed return address (``retaa``) is none: no probe can be put there."""
    return instruction.mnemonic.split()[-1] in ("ret", "retq", "retn")


def is_jump(instruction: Any) -> bool:
    """Whether it goes elsewhere without a condition and without coming back."""
    return instruction.mnemonic in ("jmp", "notrack jmp", "b", "br")


def jump_target(instruction: Any) -> int | None:
    """Where a direct jump goes; ``None`` where a register or memory says it."""
    text = instruction.op_str.removeprefix("#")
    return int(text, 16) if text.startswith("0x") else None


_OLD = {"ax": "rax", "bx": "rbx", "cx": "rcx", "dx": "rdx", "si": "rsi", "di": "rdi", "bp": "rbp", "sp": "rsp"}


def whole_register(name: str) -> str:
    """The register of x86-64 that a part of it (``edi``, ``dil``, ``r8d``) belongs to; any other name as it is."""
    if name.startswith("r"):
        return name.rstrip("dwb") if name[1:2].isdigit() else name
    short = name.removeprefix("e")
    return _OLD.get(short) or _OLD.get(short[:2]) or _OLD.get(f"{short[:1]}x", name) if len(short) <= 3 else name


def cost_class(code: bytes, machine: Machine = Machine.X86_64) -> CostClass:
    """The cost class of an instruction by its bytes."""
    return _arm64_cost(int.from_bytes(code, "little")) if machine is Machine.AARCH64 else _x86_cost(code)


def _x86_cost(code: bytes) -> CostClass:
    """Emulated are near jumps, calls and conditional jumps, the one-byte nop, and pushes of a general register; the five-byte nop
    is replaced by a call from Linux 6.18 on and single-stepped or emulated before. Everything else is single-stepped.
    """
    if code == _NOP5:
        return CostClass.OPTIMISED
    first = code[0]
    near_branch = first in (0xE8, 0xE9, 0xEB) or 0x70 <= first <= 0x7F or (first == 0x0F and 0x80 <= code[1] <= 0x8F)
    push = (len(code) == 1 and 0x50 <= first <= 0x57) or (len(code) == 2 and first == 0x41 and 0x50 <= code[1] <= 0x57)
    if near_branch or push or code == b"\x90":
        return CostClass.EMULATED
    return CostClass.SINGLE_STEPPED


_ARM64_EMULATED = (
    (0x1F000000, 0x10000000),  # adr, adrp
    (0x7C000000, 0x14000000),  # b, bl
    (0xFF000010, 0x54000000),  # b.cond
    (0x7E000000, 0x34000000),  # cbz, cbnz
    (0x7E000000, 0x36000000),  # tbz, tbnz
    (0xFF9FFC1F, 0xD61F0000),  # br, blr, ret
)
_ARM64_REFUSED = (
    (0x3B000000, 0x18000000),  # a load or prefetch of a literal beside the code
    (0x3F800000, 0x08000000),  # exclusive loads and stores
    (0xFE000000, 0xD6000000),  # authenticated branches and returns, eret
    (0xFF000000, 0xD4000000),  # svc, hvc, smc, brk, hlt
    (0xFFD00000, 0xD5100000),  # msr, mrs of a register
    (0xFFF8F01F, 0xD500401F),  # msr of a constant
)
"""(mask, value) of instructions, Arm Architecture Reference Manual (DDI 0487), C4.1."""
_ARM64_HINT = (0xFFFFF01F, 0xD503201F)
_ARM64_STEPPED_HINTS = frozenset({0, 7, 8, 10, 12, 14, 24, 25, 26, 27, 28, 29, 30, 31, 32, 34, 36, 38})
"""Hints the kernel steps over (``aarch64_insn_is_steppable_hint``): nop, pointer authentication, landing pads (``bti``)."""


def _arm64_cost(word: int) -> CostClass:
    if any(word & mask == value for mask, value in _ARM64_EMULATED):
        return CostClass.EMULATED
    if word & _ARM64_HINT[0] == _ARM64_HINT[1]:
        return CostClass.SINGLE_STEPPED if word >> 5 & 0x7F in _ARM64_STEPPED_HINTS else CostClass.REFUSED
    refused = any(word & mask == value for mask, value in _ARM64_REFUSED)
    return CostClass.REFUSED if refused else CostClass.SINGLE_STEPPED
