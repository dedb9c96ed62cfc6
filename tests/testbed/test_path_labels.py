"""Flow labels by a plan, on stand-in verbs (on real ones: ``vm/test_vm_paths.py``); other look-ups stay what they are."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ncclwatch.paths.pins import Roce, plan_text
from ncclwatch.paths.ports import label_to_port
from testbed.job import HERE, ROOT

pytestmark = pytest.mark.attach

PORTS = (50001, 0xC000, 65535)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, stand-in verbs and the program that uses them."""
    folder = tmp_path_factory.mktemp("labels")
    versions = folder / "versions.map"
    versions.write_text("IBVERBS_1.1 { global: ibv_modify_qp; ibv_reg_mr; local: *; };\n")
    pins = [ROOT / "path_pins" / name for name in ("pins.c", "labels.c")]
    shared = ["-fPIC", "-shared"]
    gcc(folder / "pins.so", *pins, *shared, f"-Wl,--version-script,{ROOT}/path_pins/exports.map")
    gcc(folder / "verbs.so", HERE / "standin" / "verbs_labels.c", *shared, f"-Wl,--version-script,{versions}")
    gcc(folder / "use", HERE / "standin" / "use_verbs.c")
    return folder


def gcc(to: Path, *words: object) -> None:
    subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-Werror", *map(str, words), "-o", str(to), "-ldl"], check=True)


def labels(built: Path, plan: Path | None, steps: str, address: str = "10.0.0.2") -> list[int]:
    """The label of each queue pair, in the order of the steps."""
    environment = {"PATH": os.environ["PATH"], "LD_PRELOAD": str(built / "pins.so"), "RANK": "3"}
    environment |= {} if plan is None else {"NCCLWATCH_PATH_PINS": str(plan)}
    run = subprocess.run(
        [built / "use", built / "verbs.so", address, steps], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run
    return [int(line.split()[1]) for line in run.stdout.splitlines()]


def test_senders_take_the_plans_ports_in_turns(built: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.pins"
    plan.write_text(plan_text([], [], [Roce(2, "10.0.0.2", (50009,)), Roce(3, "10.0.0.2", PORTS)]))
    told = labels(built, plan, "srssSs")
    assert told[1] == told[4] == 0, "a receiver's, and another thread's, have none"
    assert [label_to_port(told[at]) for at in (0, 2, 3, 5)] == [*PORTS, PORTS[0]] and 0 not in (told[0], told[2], told[3])
    assert labels(built, plan, "ss", "10.0.0.9") == [0, 0], "of another destination the plan says nothing"


@pytest.mark.parametrize(
    "text", ["", "ncclwatch-path-pins 1\nroce 3 10.0.0.2\n", "ncclwatch-path-pins 1\nroce 3 10.0.0.2 80 x\n"]
)
def test_without_a_plan_that_fits_nothing_changes(built: Path, tmp_path: Path, text: str) -> None:
    plan = tmp_path / "plan.pins"
    plan.write_text(text)
    assert labels(built, plan, "ss") == labels(built, None, "ss") == labels(built, tmp_path / "none", "ss") == [0, 0]


def test_what_comes_next_is_next_to_who_asks(built: Path, tmp_path: Path) -> None:
    """A library behind ours that asks for the next ``puts`` gets libc's, and not its own."""
    source = tmp_path / "next.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <unistd.h>\n"
        'int puts(const char *text) { void *real = dlvsym(RTLD_NEXT, "puts", "GLIBC_2.2.5");\n'
        "  _exit(real == (void *)puts ? 1 : real == 0 ? 2 : text[0] != 'x'); }\n"
    )
    gcc(tmp_path / "next.so", source, "-fPIC", "-shared")
    program = tmp_path / "say.c"
    program.write_text('#include <stdio.h>\nint main(void) { puts("x"); return 3; }\n')
    gcc(tmp_path / "say", program)
    preload = f"{built / 'pins.so'}:{tmp_path / 'next.so'}"
    assert subprocess.run([tmp_path / "say"], env={"LD_PRELOAD": preload}, check=False).returncode == 0
