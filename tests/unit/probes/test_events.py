"""The numpy mirrors of the BPF headers: generated, current, and what a C compiler makes of the headers."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ncclwatch.model import events
from ncclwatch.model.events import EVENT_DTYPE, Function
from ncclwatch.probes import map_layouts
from ncclwatch.probes.functions import FUNCTIONS, function_name
from ncclwatch.target.machine import Machine

ROOT = Path(__file__).resolve().parents[3]


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_events", ROOT / "scripts/generate_events.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


generator = load_generator()


def test_mirrors_are_what_the_headers_say() -> None:
    for path, text in generator.mirrors().items():
        assert path.read_text("utf-8") == text, f"{path.name} is stale: run scripts/generate_events.py"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_gcc_sees_the_same_layout(tmp_path: Path) -> None:
    """Offsets and sizes of every structure, from a C program that prints them."""
    lines, expected = [], []
    for header, module in (("events.h", events), ("maps.h", map_layouts)):
        for struct in generator.parse((ROOT / "bpftrace_probes" / header).read_text("utf-8")).structs.values():
            dtype = getattr(module, struct.name.removeprefix("nw_").upper() + "_DTYPE")
            expected.append(f"{struct.name} {dtype.itemsize}")
            lines.append(f'printf("{struct.name} %zu\\n", sizeof(struct {struct.name}));')
            for name in dtype.names:
                expected.append(f"{struct.name}.{name} {dtype.fields[name][1]} {dtype.fields[name][0].itemsize}")
                member = f"__builtin_offsetof(struct {struct.name}, {name}), sizeof(((struct {struct.name} *)0)->{name})"
                lines.append(f'printf("{struct.name}.{name} %zu %zu\\n", {member});')
    source = tmp_path / "layout.c"
    source.write_text(
        '#include <stdio.h>\n#include <asm/types.h>\n#include "events.h"\n#include "maps.h"\nint main(void) {\n'
        + "\n".join(lines)
        + "\nreturn 0;\n}\n"
    )
    # User space calls the 64-bit types long, the kernel long long: same size.
    subprocess.run(["gcc", "-I", ROOT / "bpftrace_probes", "-o", tmp_path / "layout", source], check=True, timeout=120)
    printed = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True, timeout=120).stdout
    assert printed.splitlines() == expected


def test_records_have_no_hidden_padding() -> None:
    covered = sum(EVENT_DTYPE[name].itemsize for name in EVENT_DTYPE.names or ())
    assert covered == EVENT_DTYPE.itemsize
    assert EVENT_DTYPE.itemsize % 8 == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("struct nw_x {\n__u8 a;\n__u32 b;\n};", "implicit padding before nw_x.b"),
        ("struct nw_x {\n__u32 a;\n__u64 b[2];\n};", "implicit padding"),
        ("struct nw_x {\n__u64 a;\n__u8 b;\n};", "ends with implicit padding"),
        ("struct nw_x {\nint a;\n};", "unknown type"),
        ("struct nw_x {\n__u32 a : 3;\n};", "cannot mirror member"),
        ("enum nw_x {\nNW_A_X,\n};", "cannot mirror enumerator"),
        ("typedef int x;", "cannot mirror"),
        ("struct nw_x {\n__u8 a[NW_NONE];\n};", "unknown constant"),
        ("enum nw_x {\nNW_A_X = 1,", "without end"),
    ],
)
def test_a_header_that_cannot_be_mirrored_is_refused(text: str, message: str) -> None:
    with pytest.raises(generator.HeaderError, match=message):
        generator.parse(text)


def test_function_numbers_fit_the_map_and_are_named() -> None:
    assert max(Function) < map_layouts.MAX_FUNCTIONS
    assert set(FUNCTIONS) == set(Function) - {Function.NONE}
    assert function_name(Function.ALL_REDUCE) == "ncclAllReduce"
    assert function_name(63) == "function 63"


def test_places_follow_the_calling_convention() -> None:
    """System V ABI: six registers, then the stack; a structure of 128 bytes takes no register."""
    assert FUNCTIONS[Function.ALL_REDUCE].places(Machine.X86_64) == {
        "sendbuff": 1,
        "recvbuff": 2,
        "count": 3,
        "datatype": 4,
        "redop": 5,
        "comm": 6,
        "stream": 7,
    }
    assert FUNCTIONS[Function.REDUCE].places(Machine.X86_64)["stream"] == 8
    assert FUNCTIONS[Function.PUT_SIGNAL].places(Machine.X86_64)["stream"] == 11
    assert FUNCTIONS[Function.COMM_INIT_RANK].places(Machine.X86_64) == {"comm_out": 1, "nranks": 2, "id_value": 1, "rank": 3}


def test_places_on_aarch64_hold_a_large_structure_by_its_address() -> None:
    """AAPCS64: eight registers, then the stack; a structure of 128 bytes is copied, and its address takes a register."""
    assert FUNCTIONS[Function.COMM_INIT_RANK].places(Machine.AARCH64) == {"comm_out": 1, "nranks": 2, "id_pointer": 3, "rank": 4}
    assert FUNCTIONS[Function.PUT_SIGNAL].places(Machine.AARCH64)["stream"] == 11


def test_specifications_pack_into_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    row = np.frombuffer(
        FUNCTIONS[Function.COMM_DESTROY].pack(enter=True, leave=False, leave_seen=True), map_layouts.FUNCTION_SPEC_DTYPE
    )[0]
    assert (row["enter_on"], row["leave_on"], row["leave_seen"], row["comm"], row["comm_freed"]) == (1, 0, 1, 1, 1)
    assert row["stream"] == 0
