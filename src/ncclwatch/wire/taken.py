"""Where NCCL takes the completions that a poll has found: the place in its code that is reached only where there are some.

A proxy asks for completions without pause, and a probe on ``ibv_poll_cq`` is hit each time. NCCL asks at one place
(``ncclIbTest``, src/transport/net_ib.cc and, from v2.28, net_ib/p2p.cc): it calls through ``ibv_context.ops``, is told how many
completions there are, and goes elsewhere if there are none. So a probe behind that branch is hit by calls that found some alone.
The code is read as it is, without a table of releases: what does not look like this has no such place, and polls are probed.

Seen in the wheels of v2.19.3, v2.21.5, v2.25.1, v2.27.5, v2.29.2 and v2.32.3: the branch is followed by a few moves and a jump,
which the kernel emulates, with the number and the address of the completions still in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ncclwatch.probes.instructions import CostClass, cost_class, jump_target, whole_register
from ncclwatch.wire import abi

FUNCTION = r"_Z10ncclIbTestPvPiS0_(?:\.part\.\d+|\.constprop\.\d+|\.isra\.\d+)*"
"""``ncclResult_t ncclIbTest(void*, int*, int*)`` as the compiler names it, whole or split."""
MAX_CODE = 1 << 16
"""Bound: bytes of a function that are looked at; the longest seen has 9 KB."""
MAX_STEPS = 48
"""Bound: instructions followed from the call on; 17 at most were seen."""

REGISTERS: Final = {
    name: index
    for index, name in enumerate(
        ("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi")
    )
} | {"rsp": 19}
"""Place of each in the kernel's ``struct pt_regs`` (x86-64), in words."""
_KEPT: Final = frozenset({"rbx", "rbp", "r12", "r13", "r14", "r15"})
"""What a call leaves as it was (System V ABI)."""
_WORD: Final = 8
_MAX_DISPLACEMENT: Final = (1 << 24) - 1


@dataclass(frozen=True, slots=True)
class Location:
    """Where a value is: the sum of a register and a displacement in bytes, or (``memory``) what lies there."""

    register: str
    displacement: int = 0
    memory: bool = False

    @property
    def packed(self) -> int:
        """30 bits, as ``value_at`` of verbs.bpf.c reads them: memory or not, the register's place, the displacement."""
        return int(self.memory) | REGISTERS[self.register] << 1 | self.displacement << 6


@dataclass(frozen=True, slots=True)
class TakenSite:
    """An instruction by its address as linked; ``number`` and ``first`` say where the number of completions and the address of
    the first (``struct ibv_wc``) are when it is reached."""

    address: int
    number: Location
    first: Location
    cost: CostClass

    @property
    def places(self) -> int:
        """Both locations, as the probe's program has them."""
        return self.number.packed | self.first.packed << 30


def taken_site(code: bytes, address: int) -> TakenSite | None:
    """The place in a function that begins at ``address`` (as linked); ``None`` where it is not found beyond doubt. x86-64 only.

    O(length of the code).
    """
    import capstone

    engine = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    engine.detail = True
    instructions = list(engine.disasm(code[:MAX_CODE], address))
    calls = [index for index, instruction in enumerate(instructions) if _is_poll(instruction)]
    if len(calls) != 1:
        return None
    first = _completions(instructions[: calls[0]])
    if first is None:
        return None
    known = _Known({Location("rax")}, {first})
    begin = _to_branch(instructions, calls[0] + 1, known)
    targets = [target for one in instructions if one.mnemonic.startswith("j") and (target := jump_target(one)) is not None]
    return _cheapest(instructions, begin, known, targets) if begin is not None else None


def _is_poll(instruction: Any) -> bool:
    """``call [context + offset of ops.poll_cq]``."""
    from capstone import x86

    if instruction.mnemonic != "call" or instruction.operands[0].type != x86.X86_OP_MEM:
        return False
    memory = instruction.operands[0].mem
    return memory.disp == abi.CONTEXT_OPS + 8 * abi.OPS["poll_cq"] and not memory.index


def _completions(before: Sequence[Any]) -> Location | None:
    """Where the third argument of the call behind these instructions stays during it: a register that is kept, or the stack."""
    for instruction in reversed(before[-MAX_STEPS:]):
        if _leaves(instruction):
            return None
        if "rdx" not in _written(instruction):
            continue
        target, source = instruction.operands if len(instruction.operands) == 2 else (None, None)
        place = _location(instruction, source) if instruction.mnemonic in ("mov", "lea") and target is not None else None
        if place is None:
            return None
        if instruction.mnemonic == "lea":
            return Location(place.register, place.displacement)
        return place if place.memory or place.register in _KEPT else None
    return None


@dataclass(slots=True)
class _Known:
    """Which locations hold the number of completions, and which the address of the first, between two instructions."""

    number: set[Location]
    first: set[Location]
    compared: bool = False
    """Whether the flags compare the number with 0."""

    def step(self, instruction: Any) -> None:
        """What is known behind an instruction that does not jump."""
        source, target = _moved(instruction)
        before = self.number, self.first
        self.number, self.first = ({one for one in known if not _overwrites(instruction, one)} for known in before)
        for known, now in zip(before, (self.number, self.first), strict=True):
            if source in known and target is not None:
                now.add(target)
        written = _written(instruction)
        if instruction.mnemonic == "test":
            places = {_location(instruction, operand) for operand in instruction.operands}
            self.compared = len(places) == 1 and places <= before[0]
        elif "rflags" in written:
            self.compared = False

    def site(self, instruction: Any) -> TakenSite | None:
        """A probe at this instruction, where both are known in front of it."""
        usable = [[one for one in known if 0 <= one.displacement <= _MAX_DISPLACEMENT] for known in (self.number, self.first)]
        if not all(usable):
            return None
        number, first = (min(known, key=lambda one: (one.memory, one.register, one.displacement)) for known in usable)
        return TakenSite(instruction.address, number, first, cost_class(bytes(instruction.bytes)))


def _to_branch(instructions: Sequence[Any], index: int, known: _Known) -> int | None:
    """Follow the code from the call on; where it goes on with at least one completion, as an index."""
    for place in range(index, min(index + MAX_STEPS, len(instructions))):
        instruction = instructions[place]
        kind = instruction.mnemonic
        if kind in _SOME_FALL_THROUGH and known.compared:
            return place + 1
        if kind in _SOME_JUMP and known.compared:
            target = jump_target(instruction)
            return next((at for at, one in enumerate(instructions) if one.address == target), None)
        if _leaves(instruction) and not (kind == "js" and known.compared):
            return None
        known.step(instruction)
    return None


_SOME_FALL_THROUGH: Final = frozenset({"je", "jle"})
_SOME_JUMP: Final = frozenset({"jne", "jg"})
"""Which way a jump sends who has completions, behind a comparison of their number with 0. An error (``js``) is none."""


def _cheapest(instructions: Sequence[Any], begin: int, known: _Known, targets: Sequence[int]) -> TakenSite | None:
    """The cheapest instruction to probe on the straight way from here; nobody else may come to it."""
    if begin >= len(instructions) or targets.count(instructions[begin].address) > 1:
        return None
    best: TakenSite | None = None
    for place in range(begin, min(begin + MAX_STEPS, len(instructions))):
        instruction = instructions[place]
        site = known.site(instruction)
        if site is None or (place > begin and instruction.address in targets):
            return best
        best = best or site
        if site.cost is CostClass.EMULATED:
            return site
        if _leaves(instruction):
            return best
        known.step(instruction)
    return best


# --- what an instruction does --------------------------------------------------------------------------------------------


def _leaves(instruction: Any) -> bool:
    return bool(instruction.mnemonic.startswith(("j", "call", "ret", "notrack", "bnd", "syscall", "ud2", "hlt")))


def _written(instruction: Any) -> set[str]:
    return {whole_register(instruction.reg_name(one)) for one in instruction.regs_access()[1]}


def _location(instruction: Any, operand: Any) -> Location | None:
    """A register of at least 32 bits, or a place on the stack; ``None`` for anything else."""
    from capstone import x86

    if operand.type == x86.X86_OP_REG and operand.size >= 4:
        name = whole_register(instruction.reg_name(operand.reg))
        return Location(name) if name in REGISTERS else None
    if operand.type == x86.X86_OP_MEM and not operand.mem.index and operand.mem.segment == 0:
        base = instruction.reg_name(operand.mem.base) if operand.mem.base else ""
        return Location("rsp", operand.mem.disp, memory=True) if base == "rsp" else None
    return None


def _moved(instruction: Any) -> tuple[Location | None, Location | None]:
    """From where to where an instruction copies a value whole; twice ``None`` where it does something else."""
    if instruction.mnemonic not in ("mov", "movsxd"):
        return None, None
    target, source = instruction.operands
    return _location(instruction, source), _location(instruction, target)


def _overwrites(instruction: Any, known: Location) -> bool:
    """Whether a location holds something else behind an instruction. Of memory the stack's own slots alone are followed."""
    written = _written(instruction)
    if known.register in written or "rsp" in written:
        return True
    if not known.memory:
        return False
    from capstone import CS_AC_WRITE

    for operand in instruction.operands:
        place = _location(instruction, operand)
        if place is not None and place.memory and operand.access & CS_AC_WRITE:
            behind = place.displacement - known.displacement
            if -operand.size < behind < _WORD:
                return True
    return False
