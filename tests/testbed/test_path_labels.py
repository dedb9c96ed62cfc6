"""The preloaded library on stand-in verbs: flow labels (on real ones: ``vm/test_vm_paths.py``) and ports of bonds by a plan, and
source ports of running queue pairs by a live request; other look-ups stay what they are."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ncclwatch.cli.paths_move import ask
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
    versions.write_text("IBVERBS_1.1 { global: ibv_modify_qp; ibv_reg_mr; ibv_destroy_qp; local: *; };\n")
    pins = [ROOT / "path_pins" / name for name in ("pins.c", "labels.c", "live.c")]
    shared = ["-fPIC", "-shared"]
    gcc(folder / "pins.so", *pins, *shared, f"-Wl,--version-script,{ROOT}/path_pins/exports.map")
    gcc(folder / "verbs.so", HERE / "standin" / "verbs_labels.c", *shared, f"-Wl,--version-script,{versions}")
    gcc(folder / "use", HERE / "standin" / "use_verbs.c")
    gcc(folder / "libmlx5.so.1", HERE / "standin" / "mlx5_ports.c", *shared, "-Wl,-soname,libmlx5.so.1")
    gcc(folder / "live", HERE / "standin" / "use_live.c")
    return folder


def gcc(to: Path, *words: object) -> None:
    subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-Werror", *map(str, words), "-o", str(to), "-ldl"], check=True)


def labels(built: Path, plan: Path | None, steps: str, address: str = "10.0.0.2") -> list[int]:
    """The label of each queue pair, in the order of the steps."""
    return [int(line.split()[2]) for line in told(built, plan, steps, address) if line.startswith("label ")]


def told(built: Path, plan: Path | None, steps: str, address: str = "10.0.0.2", *, provider: bool = False) -> list[str]:
    """What the stand-ins were asked, in order; with a ``provider`` also when each is ready to send."""
    preload = [built / "pins.so", *([built / "libmlx5.so.1"] if provider else [])]
    environment = {"PATH": os.environ["PATH"], "LD_PRELOAD": ":".join(map(str, preload)), "RANK": "3"}
    environment |= {} if plan is None else {"NCCLWATCH_PATH_PINS": str(plan)}
    environment |= {"SAY_SENDS": "1"} if provider else {}
    run = subprocess.run(
        [built / "use", built / "verbs.so", address, steps], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run
    return run.stdout.splitlines()


def test_senders_take_the_plans_ports_in_turns(built: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.pins"
    plan.write_text(plan_text([], [], [Roce(2, "10.0.0.2", (50009,)), Roce(3, "10.0.0.2", PORTS)]))
    given = labels(built, plan, "srssSs")
    assert given[1] == given[4] == 0, "a receiver's, and another thread's, have none"
    assert [label_to_port(given[at]) for at in (0, 2, 3, 5)] == [*PORTS, PORTS[0]] and 0 not in (given[0], given[2], given[3])
    assert labels(built, plan, "ss", "10.0.0.9") == [0, 0], "of another destination the plan says nothing"


def test_a_queue_pair_gets_its_port_of_the_bond_when_it_is_ready_to_send(built: Path, tmp_path: Path) -> None:
    """By a STAND-IN for the provider: in the turns of the source ports, never before, and never for who receives."""
    plan = tmp_path / "plan.pins"
    plan.write_text(plan_text([], [], [Roce(3, "10.0.0.2", PORTS, (2, 1, 2))]))
    said = told(built, plan, "srssSs", provider=True)
    assert [line for line in said if line.startswith("bond")] == ["bond 0 2", "bond 2 1", "bond 3 2", "bond 5 2"]
    assert all(said[said.index(line) - 1] == f"sends {line.split()[1]}" for line in said if line.startswith("bond")), said
    assert [line for line in said if not line.startswith("bond")] == told(built, no_bonds(tmp_path), "srssSs", provider=True)
    assert told(built, plan, "ss", provider=True)[-2:] == ["sends 1", "bond 1 1"], (
        "the provider refuses; NCCL hears nothing of it"
    )
    assert told(built, plan, "srssSs") == [line for line in said if line.startswith("label")], "no provider, no port"
    assert [line for line in told(built, plan, "ss", "10.0.0.9", provider=True) if line.startswith("bond")] == []


def no_bonds(folder: Path) -> Path:
    plan = folder / "ports.pins"
    plan.write_text(plan_text([], [], [Roce(3, "10.0.0.2", PORTS)]))
    return plan


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ncclwatch-path-pins 1\nroce 3 10.0.0.2\n",
        "ncclwatch-path-pins 1\nbond 3 10.0.0.2 x\nroce * * x\n",
        "ncclwatch-path-pins 1\nroce 3 10.0.0.2 80 x\n",
    ],
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


@contextmanager
def running(built: Path, folder: Path, *, provider: bool = True) -> Iterator[subprocess.Popen[str]]:
    """A process with queue pairs 5, 6 and 7 that may be asked by way of a folder."""
    preload = [built / "pins.so", *([built / "libmlx5.so.1"] if provider else [])]
    environment = {"LD_PRELOAD": ":".join(map(str, preload)), "NCCLWATCH_PATH_LIVE": str(folder)}
    process = subprocess.Popen(
        [built / "live", built / "verbs.so"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0, "it ends as ever"
    finally:
        process.kill()
        process.wait()


def keyed(folder: Path, key: str = "sixteen-bytes-it-is", mode: int = 0o600) -> Path:
    file = folder / "key"
    file.write_text(f"{key}\n")
    file.chmod(mode)
    return folder


def test_a_running_queue_pair_is_moved_on_request(built: Path, tmp_path: Path) -> None:
    with running(built, keyed(tmp_path)) as process:
        assert process.stdout is not None and process.stdin is not None
        assert ask(tmp_path, process.pid, 6, 50001) == ask(tmp_path, process.pid, 5, 65535) == 0
        assert [process.stdout.readline(), process.stdout.readline()] == ["moved 6 50001\n", "moved 5 65535\n"]
        assert ask(tmp_path, process.pid, 7, 50001) == errno.EOPNOTSUPP, "the provider's word"
        assert [ask(tmp_path, process.pid, *wrong) for wrong in ((8, 50001), (5, 4791), (5, 1 << 17))] == [
            errno.ENOENT, errno.EINVAL, errno.EINVAL,
        ]  # fmt: skip
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "destroyed 0\n"
        assert ask(tmp_path, process.pid, 6, 50002) == errno.ENOENT, "what is destroyed is let go of before"
        (tmp_path / "key").write_text("another-key-of-20-bytes")
        assert ask(tmp_path, process.pid, 5, 50003) == errno.EACCES
    assert not list(tmp_path.glob("*.sock"))


def test_without_a_provider_that_can_nothing_moves(built: Path, tmp_path: Path) -> None:
    with running(built, keyed(tmp_path), provider=False) as process:
        assert ask(tmp_path, process.pid, 5, 50001) == errno.EOPNOTSUPP


@pytest.mark.parametrize(("key", "mode"), [("sixteen-bytes-it-is", 0o644), ("short", 0o600), (None, 0)])
def test_without_a_secret_nobody_can_ask(built: Path, tmp_path: Path, key: str | None, mode: int) -> None:
    if key is not None:
        keyed(tmp_path, key, mode)
    with running(built, tmp_path):
        assert not list(tmp_path.glob("*.sock"))


@pytest.mark.parametrize(
    "said", [b"", b"\n", b"x" * 4096, b"sixteen-bytes-it-is 5\n", b"sixteen-bytes-it-is -1 -1\n", b"\0\xff\n"]
)
def test_nonsense_moves_nothing_and_harms_nobody(built: Path, tmp_path: Path, said: bytes) -> None:
    with running(built, keyed(tmp_path)) as process:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(tmp_path / f"{process.pid}.sock"))
            caller.sendall(said)
            caller.shutdown(socket.SHUT_WR)
            assert caller.recv(64) in (b"", b"13\n", b"22\n")
        assert ask(tmp_path, process.pid, 5, 50001) == 0
        assert process.stdout is not None and process.stdout.readline() == "moved 5 50001\n"
