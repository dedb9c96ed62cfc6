"""Where NCCL takes completions is found in its code, and only where there is no doubt."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ncclwatch.probes.instructions import CostClass, whole_register
from ncclwatch.wire.taken import Location, TakenSite, taken_site

BASE = 0x1000

ASK = "mov $4, %esi; mov (%rdi), %rax; call *0x60(%rax); "
LOOP = "site: jmp body; nop; again: add $0x30, %rbx; body: mov 8(%rbx), %ecx; test %ecx, %ecx; jne again; "
END = "none: xor %eax, %eax; ret; wrong: mov $3, %eax; ret"


def assembled(text: str, folder: Path) -> tuple[bytes, int]:
    """The code, and the address of its label ``site`` (0 without one), as linked at :data:`BASE`."""
    source, object_file, code = (folder / name for name in ("code.s", "code.o", "code.bin"))
    source.write_text(".text\n" + text.replace("; ", "\n") + "\n")
    subprocess.run(["as", "-o", object_file, source], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", object_file, code], check=True)
    names = subprocess.run(["nm", object_file], check=True, capture_output=True, text=True).stdout.split()
    site = names[names.index("site") - 2] if "site" in names else ""
    return code.read_bytes(), BASE + int(site, 16) if site else 0


@pytest.mark.parametrize(
    ("before", "behind", "number", "first"),
    [
        # In registers that a call leaves alone (v2.19.3).
        (
            "mov %r14, %rdx; ",
            "test %eax, %eax; js wrong; je none; mov %r14, %rbx; xor %r10d, %r10d; ",
            Location("rax"),
            Location("r14"),
        ),
        # The address in a slot of the stack, the number added to a sum there (v2.21.5 to v2.27.5).
        (
            "mov 0x20(%rsp), %rdx; ",
            "mov %eax, %r15d; test %eax, %eax; js wrong; add %eax, 0x18(%rsp); test %eax, %eax; je none; xor %eax, %eax; ",
            Location("r15"),
            Location("rsp", 0x20, memory=True),
        ),
        # Compared, changed and then sent on (v2.32.3).
        (
            "lea 0x100(%rsp), %rdx; ",
            "mov %eax, %r12d; test %eax, %eax; js wrong; lea (%rax,%r14,1), %eax; movq $0, 0x70(%rsp); je none; ",
            Location("r12"),
            Location("rsp", 0x100),
        ),
        # Who has some is sent elsewhere (v2.29.2); the number lies on the stack alone.
        (
            "mov %rbx, %rdx; ",
            "mov %eax, 8(%rsp); test %eax, %eax; js wrong; jne some; jmp none; some: xor %eax, %eax; ",
            Location("rsp", 8, memory=True),
            Location("rbx"),
        ),
    ],
)
def test_the_place_behind_the_branch_is_found(
    before: str, behind: str, number: Location, first: Location, tmp_path: Path
) -> None:
    code, site = assembled(before + ASK + behind + LOOP + END, tmp_path)
    assert taken_site(code, BASE) == TakenSite(site, number, first, CostClass.EMULATED)


BRANCH = "test %eax, %eax; js wrong; je none; "


@pytest.mark.parametrize(
    "text",
    [
        "mov %rcx, %rdx; " + ASK + BRANCH + LOOP + END,  # the call may change rcx
        "mov %r14, %rdx; "
        + ASK
        + BRANCH
        + "mov %r14, %rbx; xor %r14d, %r14d; xor %ebx, %ebx; "
        + LOOP
        + END,  # no address is left
        "mov %r14, %rdx; " + ASK + BRANCH + "xor %eax, %eax; " + LOOP + END,  # nor is the number
        "mov %r14, %rdx; " + ASK + "test %ecx, %ecx; je none; " + LOOP + END,  # something else decides
        "mov %r14, %rdx; "
        + ASK
        + BRANCH
        + "mov %r14, %rbx; middle: nop; "
        + LOOP
        + "jmp middle; "
        + END,  # others come there, too
        "mov %r14, %rdx; " + ASK + BRANCH + LOOP + ASK + END,  # two calls that poll
        "mov %r14, %rdx; mov (%rdi), %rax; call *0x68(%rax); " + BRANCH + LOOP + END,  # none does
        "mov %r14, %rdx; " + ASK.removesuffix("; "),
        "ret",
    ],
)
def test_in_doubt_there_is_none(text: str, tmp_path: Path) -> None:
    found = taken_site(assembled(text, tmp_path)[0], BASE)
    assert found is None or found.cost is not CostClass.EMULATED


def test_a_dearer_place_does_where_no_cheap_one_is_straight_ahead(tmp_path: Path) -> None:
    text = (
        "mov %r14, %rdx; "
        + ASK
        + BRANCH
        + "site: mov %r14, %rbx; mov %eax, %ecx; xor %r14d, %r14d; xor %ebx, %ebx; "
        + LOOP
        + END
    )
    text = text.replace("site: jmp", "jmp")
    code, site = assembled(text, tmp_path)
    assert taken_site(code, BASE) == TakenSite(site, Location("rax"), Location("r14"), CostClass.SINGLE_STEPPED)


def test_what_is_filled_into_a_program_fits_into_a_word() -> None:
    site = TakenSite(
        BASE, Location("rsp", (1 << 24) - 1, memory=True), Location("rsp", (1 << 24) - 1, memory=True), CostClass.EMULATED
    )
    assert site.places < 1 << 60
    assert site.places & 1 and site.places >> 1 & 31 == 19 and site.places >> 30 == site.number.packed


def test_bytes_that_are_no_code_are_none() -> None:
    for junk in (b"", b"\x00" * 64, bytes(range(256)), b"\xff" * 300):
        assert taken_site(junk, BASE) is None


def test_a_part_of_a_register_is_known_by_the_whole() -> None:
    parts = {
        "rax": "eax ax al ah", "rbx": "ebx bx bl bh", "rcx": "ecx cl", "rdx": "edx dh", "rsi": "esi si sil", "rdi": "edi di dil",
        "rbp": "ebp bp bpl", "rsp": "esp sp spl", "r8": "r8d r8w r8b", "r15": "r15 r15d", "rflags": "rflags", "xmm0": "xmm0",
    }  # fmt: skip
    for whole, names in parts.items():
        assert {whole_register(name) for name in [whole, *names.split()]} == {whole}
