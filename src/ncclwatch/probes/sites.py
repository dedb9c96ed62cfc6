"""Where to probe: entry and return instructions of NCCL's exported functions, and what a hit of each costs.

Return instructions are probed in place of uretprobes, because those replace the return address on the stack and so break
unwinding of exactly the threads that hang. A breakpoint must never land inside an instruction: functions are disassembled
(capstone) from their symbol to its end, and a function that does not decode to exactly its size gets no return sites.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ncclwatch.model.events import Function
from ncclwatch.probes.functions import FUNCTIONS, FunctionSpec
from ncclwatch.probes.instructions import (
    CostClass,
    cost_class,
    disassemble,
    entry_of,
    is_jump,
    is_return,
    jump_target,
)
from ncclwatch.probes.map_layouts import SiteKind
from ncclwatch.target.elf import PT_LOAD, SHT_DYNSYM, ElfError, ElfFile, Symbol
from ncclwatch.target.machine import Machine

MAX_FUNCTION_SIZE = 1 << 20
"""No exported function of NCCL comes near; a larger one is a damaged symbol."""
_NAMES = r"(p?nccl[A-Z]|cu(da)?(Graph|Stream)[A-Z])\w*"
_SYMBOL_SIZE = 24
_MOST_SYMBOLS_OF_NCCL = 5000


@dataclass(frozen=True, slots=True)
class ProbeSite:
    """One instruction to probe. ``address`` is as linked, ``offset`` its place in the file."""

    function: Function
    symbol: str
    kind: SiteKind
    address: int
    offset: int
    instruction: str
    code: bytes
    cost: CostClass


@dataclass(frozen=True, slots=True)
class FunctionSites:
    """The sites of one exported function; ``problem`` says why its leave cannot be seen, or not on every path."""

    function: Function
    symbol: str
    entry: ProbeSite
    returns: tuple[ProbeSite, ...] = ()
    problem: str = ""


def code_range(elf: ElfFile, sites: Iterable[FunctionSites]) -> tuple[int, int]:
    """Where NCCL's own code lies (addresses as linked): a call from in there is not the user's.

    A library of few dynamic symbols is NCCL altogether (300 in 2.21, 500 in 2.32); of one that carries NCCL among other things
    (libtorch_cuda has over 100,000), it is the stretch between the first and the last probe, because the linker keeps
    an archive's members together.
    """
    ours = [site.address for found in sites for site in (found.entry, *found.returns)]
    if not ours:
        return 0, 0
    dynamic = next((section.size // _SYMBOL_SIZE for section in elf.sections if section.type == SHT_DYNSYM), 0)
    if dynamic > _MOST_SYMBOLS_OF_NCCL:
        return min(ours), max(ours) + 1
    executable = [s for s in elf.segments if s.type == PT_LOAD and s.flags & 1]
    return min(s.address for s in executable), max(s.address + s.memory_size for s in executable)


def find_sites(elf: ElfFile, functions: Iterable[Function] | None = None) -> tuple[FunctionSites, ...]:
    """Sites of every function of NCCL the file has, in order of address; each address once.

    ``functions`` restricts them. Raises :class:`ElfError` for a damaged file and for one of an
    architecture that ncclwatch does not know.
    """
    _machine_of(elf)
    wanted = set(FUNCTIONS if functions is None else functions)
    # A static NCCL may be hidden: then it is in the symbol table only.
    symbols = elf.exports(_NAMES) or elf.symbols(_NAMES)
    found: dict[int, FunctionSites] = {}
    for spec in FUNCTIONS.values():
        if spec.function not in wanted:
            continue
        for name in spec.symbols:
            symbol = symbols.get(name)
            if symbol and symbol.address not in found and (sites := _function_sites(elf, spec, symbol)):
                found[symbol.address] = sites
    return tuple(found[address] for address in sorted(found))


def _function_sites(elf: ElfFile, spec: FunctionSpec, symbol: Symbol) -> FunctionSites | None:
    """Entry and return sites of one function, or ``None`` when the symbol is no code of the file."""
    if not 0 < symbol.size <= MAX_FUNCTION_SIZE or elf.file_offset(symbol.address) is None:
        return None
    code = _code(elf, symbol.address, symbol.size)
    if not code:
        return None
    entry = _site(elf, spec, symbol, SiteKind.ENTER, entry_of(_machine_of(elf), code))
    if entry.cost is CostClass.REFUSED:
        return None
    returns, problem = _find_returns(elf, symbol, code)
    sites = tuple(_site(elf, spec, symbol, SiteKind.LEAVE, instruction) for instruction in returns)
    return FunctionSites(spec.function, symbol.name.removeprefix("p"), entry, sites, problem)


def _machine_of(elf: ElfFile) -> Machine:
    if elf.architecture is None:
        raise ElfError(f"{elf.name} is for another architecture", "ncclwatch probes x86-64 and aarch64 only")
    return elf.architecture


def _code(elf: ElfFile, address: int, size: int) -> list[Any]:
    return disassemble(_machine_of(elf), elf.read_address(address, size), address)


def _find_returns(elf: ElfFile, symbol: Symbol, code: list[Any]) -> tuple[list[Any], str]:
    """Return instructions of a function and of the parts that the compiler moved away, and what is wrong with them."""
    stretches = [(symbol.address, symbol.size, code)]
    plain = symbol.name.removeprefix("p")
    parts = {part.address: part for name in (plain, "p" + plain) for part in elf.parts(name)}
    stretches += [(part.address, part.size, _code(elf, part.address, part.size)) for part in parts.values()]
    for begin, size, instructions in stretches:
        decoded = instructions[-1].address + instructions[-1].size - begin if instructions else 0
        if decoded != size:
            return [], f"leave unavailable: its code does not decode at {begin + decoded:#x}"
    inside = [(begin, begin + size) for begin, size, _ in stretches]
    returns, tail_calls, unknown_jumps = [], 0, 0
    for _, _, instructions in stretches:
        for instruction in instructions:
            if is_return(instruction):
                returns.append(instruction)
            elif is_jump(instruction):
                target = jump_target(instruction)
                if target is None:
                    unknown_jumps += 1
                elif not any(begin <= target < end for begin, end in inside):
                    tail_calls += 1
    return returns, _describe_problem(len(returns), tail_calls, unknown_jumps, elf.is_stripped)


def _describe_problem(returns: int, tail_calls: int, unknown_jumps: int, stripped: bool) -> str:
    if not returns:
        return "leave unavailable: it has no return instruction, it ends in a tail call"
    if tail_calls and not stripped:
        return f"leave incomplete: {tail_calls} exits are tail calls"
    if tail_calls:
        return f"leave may be incomplete: {tail_calls} jumps lead out of it (a stripped file does not say where to)"
    # An indirect jump is a jump table as a rule; that it were a tail call cannot be excluded.
    return f"leave may be incomplete: {unknown_jumps} indirect jumps" if unknown_jumps else ""


def _site(elf: ElfFile, spec: FunctionSpec, symbol: Symbol, kind: SiteKind, instruction: Any) -> ProbeSite:
    offset = elf.file_offset(instruction.address)
    if offset is None:
        raise ElfError(f"{elf.name} is damaged: {symbol.name} lies outside of the file")
    code = bytes(instruction.bytes)
    text = f"{instruction.mnemonic} {instruction.op_str}".strip()
    return ProbeSite(
        spec.function,
        symbol.name.removeprefix("p"),
        kind,
        instruction.address,
        offset,
        text,
        code,
        cost_class(code, _machine_of(elf)),
    )
