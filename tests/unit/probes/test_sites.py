"""Choosing instructions to probe, on small libraries compiled here that look like NCCL to a linker."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclwatch.model.events import Function
from ncclwatch.probes import site_cache
from ncclwatch.probes.image_cache import ImageCache
from ncclwatch.probes.instructions import CostClass, cost_class
from ncclwatch.probes.site_cache import sites_of
from ncclwatch.probes.sites import code_range, find_sites
from ncclwatch.target.elf import ElfError, ElfFile
from ncclwatch.target.machine import Machine

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

SOURCE = r"""
        .text
        .macro function name
        .globl  p\name
        .type   p\name, @function
p\name:
        .weak   \name
        .set    \name, p\name
        .endm

function ncclAllReduce                  # two returns, a jump between them
        push    %rbp
        test    %edi, %edi
        jne     1f
        pop     %rbp
        ret
1:      jmp     2f
2:      mov     $1, %eax
        pop     %rbp
        ret
        .size   pncclAllReduce, .-pncclAllReduce

function ncclBcast                      # a tail call and nothing else
        mov     %rdi, %rsi
        jmp     pncclAllReduce
        .size   pncclBcast, .-pncclBcast

function ncclGroupEnd                   # endbr64 first, an indirect jump, a return in a part that was moved away
        endbr64
        push    %r12
        cmp     $3, %edi
        ja      pncclGroupEnd.cold
        jmp     *%rax
        pop     %r12
        ret     $8
        .size   pncclGroupEnd, .-pncclGroupEnd

        .type   pncclGroupEnd.cold, @function
pncclGroupEnd.cold:
        pop     %r12
        ret
        .size   pncclGroupEnd.cold, .-pncclGroupEnd.cold

function ncclSend                       # its size ends inside an instruction: what follows it cannot be trusted
        .byte   0x0f, 0x1f, 0x44, 0x00, 0x00
        ret
        movabs  $0x1122334455667788, %rax
        .size   pncclSend, .-pncclSend-3
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("sites")

    def compile_library(name: str, *flags: str, source: str = SOURCE) -> Path:
        path = folder / f"{name}.S"
        path.write_text(source)
        library = folder / f"{name}.so"
        subprocess.run(["gcc", "-shared", "-nostdlib", "-o", library, path, *flags], check=True, timeout=120)
        return library

    return compile_library


@pytest.fixture(scope="module")
def library(build: Callable[..., Path]) -> Path:
    return build("library")


def test_aliases_are_probed_once_under_their_public_name(library: Path) -> None:
    with ElfFile.open(library) as elf:
        sites = find_sites(elf)
    assert [site.symbol for site in sites] == ["ncclAllReduce", "ncclBcast", "ncclGroupEnd", "ncclSend"]
    assert [site.function for site in sites] == [Function.ALL_REDUCE, Function.BCAST, Function.GROUP_END, Function.SEND]


def test_every_return_is_found_and_lies_on_a_return_instruction(library: Path) -> None:
    with ElfFile.open(library) as elf:
        found = {site.function: site for site in find_sites(elf)}[Function.ALL_REDUCE]
        assert found.problem == ""
        assert found.entry.instruction == "push rbp"
        assert found.entry.cost is CostClass.EMULATED
        assert len(found.returns) == 2
        for site in (found.entry, *found.returns):
            assert library.read_bytes()[site.offset : site.offset + len(site.code)] == site.code
        assert {site.code for site in found.returns} == {b"\xc3"}
        assert {site.cost for site in found.returns} == {CostClass.SINGLE_STEPPED}


def test_a_function_that_ends_in_a_tail_call_has_no_leave(library: Path) -> None:
    with ElfFile.open(library) as elf:
        found = {site.function: site for site in find_sites(elf)}[Function.BCAST]
    assert found.returns == ()
    assert found.problem == "leave unavailable: it has no return instruction, it ends in a tail call"


def test_parts_moved_away_by_the_compiler_belong_to_the_function(library: Path) -> None:
    with ElfFile.open(library) as elf:
        found = {site.function: site for site in find_sites(elf)}[Function.GROUP_END]
    assert [site.code for site in found.returns] == [b"\xc2\x08\x00", b"\xc3"]
    assert found.problem == "leave may be incomplete: 1 indirect jumps"
    assert found.entry.instruction == "push r12", "endbr64 is stepped over: the push after it costs a twentieth"


def test_code_that_does_not_decode_to_its_end_gets_no_return_sites(library: Path) -> None:
    with ElfFile.open(library) as elf:
        found = {site.function: site for site in find_sites(elf)}[Function.SEND]
    assert found.returns == ()
    assert found.problem.startswith("leave unavailable: its code does not decode at ")
    assert found.entry.cost is CostClass.OPTIMISED


def test_a_stripped_library_says_that_parts_may_be_missing(build: Callable[..., Path]) -> None:
    with ElfFile.open(build("stripped", "-s")) as elf:
        found = {site.function: site for site in find_sites(elf)}[Function.ALL_REDUCE]
        bcast = {site.function: site for site in find_sites(elf)}[Function.BCAST]
    assert len(found.returns) == 2
    assert found.problem == ""
    assert bcast.problem.startswith("leave unavailable")


def test_a_hidden_static_nccl_is_found_in_the_symbol_table(build: Callable[..., Path]) -> None:
    source = SOURCE.replace(".globl  p", ".hidden p").replace(".weak   ", ".local ")
    with ElfFile.open(build("hidden", source=source)) as elf:
        assert elf.exports(r"p?nccl.*") == {}
        assert [site.symbol for site in find_sites(elf)] == ["ncclAllReduce", "ncclBcast", "ncclGroupEnd", "ncclSend"]


def test_only_the_functions_asked_for(library: Path) -> None:
    with ElfFile.open(library) as elf:
        assert [site.function for site in find_sites(elf, [Function.SEND])] == [Function.SEND]
        assert find_sites(elf, []) == ()


def test_a_library_of_another_kind_has_no_sites(build: Callable[..., Path]) -> None:
    other = build("other", source=".text\n.globl foo\n.type foo,@function\nfoo: ret\n.size foo,.-foo\n")
    with ElfFile.open(other) as elf:
        assert find_sites(elf) == ()
        assert code_range(elf, ()) == (0, 0)


def test_another_machine_is_refused(library: Path, tmp_path: Path) -> None:
    with ElfFile.open(said_to_be(library, 21, tmp_path)) as elf, pytest.raises(ElfError, match="x86-64 and aarch64 only"):
        find_sites(elf)


def said_to_be(library: Path, machine: int, folder: Path) -> Path:
    """A copy of a library whose header names another architecture (``e_machine``)."""
    data = bytearray(library.read_bytes())
    data[18:20] = machine.to_bytes(2, "little")
    path = folder / f"of-{machine}.so"
    path.write_bytes(data)
    return path


# Words of aarch64, so that no assembler for it is needed.
ARM_SOURCE = r"""
        .text
        .macro function name
        .globl  p\name
        .type   p\name, @function
p\name:
        .weak   \name
        .set    \name, p\name
        .endm

        .balign 4
function ncclAllReduce                  # two returns, a jump between them
all_reduce:
        .long   0xa9bf7bfd              # stp x29, x30, [sp, #-16]!
        .long   0x34000060              # cbz w0, 1f
        .long   0xa8c17bfd              # ldp x29, x30, [sp], #16
        .long   0xd65f03c0              # ret
        .long   0x14000001              # 1: b 2f
        .long   0xa8c17bfd
        .long   0xd65f03c0
        .size   pncclAllReduce, .-pncclAllReduce

function ncclBcast                      # a tail call and nothing else
        .long   0x90000003              # adrp x3, .
        .long   0x14000000 + (((all_reduce - .) >> 2) & 0x3ffffff)
        .size   pncclBcast, .-pncclBcast

function ncclSend                       # a landing pad, and a return that checks a signed address
        .long   0xd503245f              # bti c
        .long   0xd61f0220              # br x17
        .long   0xd65f0bff              # retaa
        .size   pncclSend, .-pncclSend

function ncclRecv                       # begins with what no probe can step over
        .long   0x58000040              # ldr x0, .+8
        .long   0xd65f03c0
        .size   pncclRecv, .-pncclRecv
"""


def test_sites_of_aarch64(build: Callable[..., Path], tmp_path: Path) -> None:
    with ElfFile.open(said_to_be(build("arm", source=ARM_SOURCE), 183, tmp_path)) as elf:
        found = {site.function: site for site in find_sites(elf)}
    everywhere = found[Function.ALL_REDUCE]
    assert everywhere.entry.instruction.startswith("stp x29, x30") and everywhere.entry.cost is CostClass.SINGLE_STEPPED
    assert [site.instruction for site in everywhere.returns] == ["ret", "ret"] and everywhere.problem == ""
    assert {site.cost for site in everywhere.returns} == {CostClass.EMULATED}
    assert [site.address - everywhere.entry.address for site in everywhere.returns] == [12, 24]
    tail = found[Function.BCAST]
    assert tail.entry.cost is CostClass.EMULATED and "ends in a tail call" in tail.problem
    signed = found[Function.SEND]
    assert signed.entry.instruction == "bti c" and signed.returns == () and "leave unavailable" in signed.problem
    assert Function.RECV not in found


@pytest.mark.parametrize(
    ("word", "cost"),
    [
        (0xD503201F, CostClass.SINGLE_STEPPED),  # nop
        (0xD503233F, CostClass.SINGLE_STEPPED),  # paciasp
        (0xD503207F, CostClass.REFUSED),  # wfi
        (0x97FFFFFF, CostClass.EMULATED),  # bl
        (0x54000041, CostClass.EMULATED),  # b.ne
        (0x37080040, CostClass.EMULATED),  # tbnz
        (0xB4000040, CostClass.EMULATED),  # cbz x0
        (0x10000000, CostClass.EMULATED),  # adr
        (0xD63F0000, CostClass.EMULATED),  # blr x0
        (0xD4000001, CostClass.REFUSED),  # svc #0
        (0xD4200000, CostClass.REFUSED),  # brk #0
        (0xC85F7C20, CostClass.REFUSED),  # ldxr x0, [x1]
        (0xC8DFFC20, CostClass.SINGLE_STEPPED),  # ldar x0, [x1]
        (0xD53BD040, CostClass.REFUSED),  # mrs x0, tpidr_el0
        (0xD65F0BFF, CostClass.REFUSED),  # retaa
        (0xD10083FF, CostClass.SINGLE_STEPPED),  # sub sp, sp, #32
        (0x98000040, CostClass.REFUSED),  # ldrsw x0, .+8
        (0xF9400000, CostClass.SINGLE_STEPPED),  # ldr x0, [x0]
    ],
)
def test_what_the_kernel_does_with_an_instruction_of_aarch64(word: int, cost: CostClass) -> None:
    assert cost_class(word.to_bytes(4, "little"), Machine.AARCH64) is cost


def test_code_range_of_a_library_that_is_nccl_and_of_one_that_carries_it(build: Callable[..., Path], library: Path) -> None:
    with ElfFile.open(library) as elf:
        sites = find_sites(elf)
        begin, end = code_range(elf, sites)
        assert begin <= sites[0].entry.address
        assert sites[-1].entry.address < end
        assert code_range(elf, sites) == (begin, end)
    others = "".join(
        f"\n.globl torch{n}\n.type torch{n},@function\ntorch{n}: ret\n.size torch{n},.-torch{n}\n" for n in range(5200)
    )
    with ElfFile.open(build("torch", source=SOURCE + others)) as elf:
        sites = find_sites(elf)
        begin, end = code_range(elf, sites)
        assert begin == sites[0].entry.address
        assert sites[-1].entry.address < end <= sites[-1].entry.address + 32


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("55", CostClass.EMULATED),  # push rbp
        ("4157", CostClass.EMULATED),  # push r15
        ("90", CostClass.EMULATED),
        ("eb10", CostClass.EMULATED),
        ("e900000000", CostClass.EMULATED),
        ("e800000000", CostClass.EMULATED),
        ("7505", CostClass.EMULATED),
        ("0f8500000000", CostClass.EMULATED),
        ("0f1f440000", CostClass.OPTIMISED),
        ("c3", CostClass.SINGLE_STEPPED),
        ("f30f1efa", CostClass.SINGLE_STEPPED),  # endbr64
        ("4883ec10", CostClass.SINGLE_STEPPED),  # sub rsp, 16
        ("0fb6c0", CostClass.SINGLE_STEPPED),  # movzx: the same first byte as a conditional jump
        ("6655", CostClass.SINGLE_STEPPED),  # push bp
        ("4055", CostClass.SINGLE_STEPPED),  # push rbp with a needless prefix
    ],
)
def test_cost_classes(code: str, expected: CostClass) -> None:
    assert cost_class(bytes.fromhex(code)) is expected


def test_a_child_finds_the_same_sites_and_they_are_kept(
    build: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_cache, "TIMEOUT_S", 250.0)  # At idle priority a child may have to wait long for a CPU.
    library, cache = build("kept", "-Wl,--build-id"), ImageCache(tmp_path / "programs")
    with ElfFile.open(library) as elf:
        expected = find_sites(elf)
        assert sites_of(elf, cache=cache) == expected
        assert len(list((tmp_path / "programs").iterdir())) == 1
        monkeypatch.setattr(site_cache, "_ask_child", lambda _: pytest.fail("it was kept"))
        monkeypatch.setattr(site_cache, "find_sites", lambda *_: pytest.fail("it was kept"))
        assert sites_of(elf, cache=cache) == expected
        assert [found.function for found in sites_of(elf, [Function.BCAST], cache)] == [Function.BCAST]


def test_what_was_kept_and_is_damaged_is_found_again(build: Callable[..., Path], tmp_path: Path) -> None:
    library, cache = build("damaged", "-Wl,--build-id"), ImageCache(tmp_path / "programs")
    with ElfFile.open(library) as elf:
        expected = sites_of(elf, cache=cache)
        (file,) = (tmp_path / "programs").iterdir()
        for text in (
            "[]x",
            '[[1, "ncclAllReduce", ""]]',
            '{"a": 1}',
            '[[1, "n", "", ["enter", 1, 2, "push", "zz", "emulated"]]]',
        ):
            file.write_text(text)
            assert sites_of(elf, cache=cache) == expected


def test_without_a_child_the_process_looks_itself(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_cache, "_ask_child", lambda _: None)
    with ElfFile.open(library) as elf:
        assert sites_of(elf, cache=ImageCache(tmp_path / "programs")) == find_sites(elf)
