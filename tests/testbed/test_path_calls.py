"""Whatever a probe, a plan or the library of pins can do to a machine: their system calls, and the functions they may call. Of
``paths probe --udp --queues``, which needs RDMA, in the guest (``vm/test_vm_probe.py``).

A call that is not listed here fails: who adds one says here what for.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from testbed.job import available, build, build_folder
from testbed.spines import Spines
from testbed.syscalls import calls

pytestmark = [
    pytest.mark.attach,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

OWN_SOCKETS = {"socket", "bind", "connect", "setsockopt", "getsockopt", "getsockname", "recvmsg", "sendto", "recvfrom", "poll"}
"""What probes are made of: sockets of their own."""
NETLINK = {"socketpair", "getpeername"}
"""How pyroute2 asks for the name of the NIC that has an address."""
FILES = {"rename"}
"""The plan takes its place in one step."""


def test_what_commands_about_paths_can_do(tmp_path: Path) -> None:
    probe, flows, plan = tmp_path / "p", tmp_path / "m", tmp_path / "plan"
    with Spines() as fabric:
        five = {
            "protocol": "tcp", "source": fabric.address(0), "source_port": 40100,
            "destination": fabric.address(1), "destination_port": 40000,
        }  # fmt: skip
        flow = {"job": "j", "comm_hash": "c", "channel": 0, "rank": 0, "peer": 1, "five_tuple": five}
        flows.write_text(json.dumps({"schema": "ncclwatch.paths/1", "flows": [flow]}))
        other, popen = fabric.address(1), fabric.hosts[0].popen
        made = calls(
            tmp_path / "1", ["paths", "probe", other, "--sources", "26100-26103", "--flows", str(flows), "-o", str(probe)], popen
        )
        made += calls(tmp_path / "2", ["paths", "probe", other, "--udp", "--sources", "50000-50003", "--lldp", "0.5"], popen)
        planned = calls(tmp_path / "3", ["paths", "plan", str(flows), str(probe), "--floor", "0", "-o", str(plan)], popen)
        made += calls(tmp_path / "4", ["paths", "follow", str(flows), str(probe), "-o", str(plan), "--duration", "1"], popen)
        planned += calls(tmp_path / "5", ["paths", "topology", str(flows), str(probe)], popen)
    assert {name for name, _ in made} <= OWN_SOCKETS | NETLINK | FILES, {name for name, _ in made} - OWN_SOCKETS - FILES
    # A plan reaches nothing but its file.
    assert {name for name, _ in planned} <= FILES, planned
    renamed = {line for name, line in [*made, *planned] if name == "rename"}
    assert all(str(tmp_path) in line for line in renamed) and renamed
    kinds = {line.split("(")[1].split(")")[0] for name, line in made if name == "socket"}
    assert all(kind.startswith(("AF_INET, SOCK_", "AF_UNIX", "AF_NETLINK", "AF_PACKET")) for kind in kinds), kinds
    raw = [line for name, line in made if name == "socket" and "AF_INET, SOCK_RAW" in line]
    assert raw and all("IPPROTO_TCP" in line or "IPPROTO_ICMP" in line for line in raw), raw


def test_a_live_request_reaches_the_socket_of_the_process_and_nothing_else(tmp_path: Path) -> None:
    def answer() -> None:
        with process.accept()[0] as caller:
            caller.recv(256)
            caller.send(b"0\n")

    (tmp_path / "key").write_text("sixteen-bytes-it-is")
    with Spines() as fabric, socket.socket(socket.AF_UNIX) as process:
        process.bind(str(tmp_path / "17.sock"))
        process.listen()
        answers = threading.Thread(target=answer, daemon=True)
        answers.start()
        made = calls(tmp_path / "1", ["paths", "move", str(tmp_path), "17", "5:50001"], fabric.hosts[0].popen)
        answers.join()
    assert {name for name, _ in made} == {"socket", "connect", "poll", "sendto", "recvfrom"}, made
    assert all("AF_UNIX" in line for name, line in made if name == "socket") and sum(name == "connect" for name, _ in made) == 1


@pytest.mark.skipif(not available("2.27.5"), reason="NCCL 2.27.5 is not cached")
def test_what_the_library_of_pins_can_call() -> None:
    build("2.27.5")
    said = subprocess.run(
        ["nm", "-D", "--undefined-only", "--without-symbol-versions", str(build_folder() / "libncclwatch_pins.so")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    called = {line.split()[-1] for line in said.splitlines() if " w " not in line}
    assert called <= {
        # The next bind and connect are looked up; of a socket that cannot use its port another one is made.
        "dlsym", "socket", "setsockopt", "getsockopt", "getsockname", "fcntl", "fcntl64", "dup2", "close",
        # The plan and the environment are read; NCCL is asked to name its threads.
        "open", "open64", "read", "getenv", "setenv", "prctl",
        # Labels: what each thread has seen of queue pairs.
        "__tls_get_addr",
        # Live requests: a thread that answers at a socket of the owner's alone; the provider's function is looked up.
        "pthread_once", "pthread_create", "pthread_detach", "pthread_mutex_lock", "pthread_mutex_unlock", "pthread_sigmask",
        "sigfillset", "listen", "accept4", "recv", "send", "fstat", "chmod", "unlink", "geteuid", "getpid", "sleep", "dlopen",
        "snprintf", "strchr", "strcspn",
        "inet_pton", "ntohs", "htons", "sscanf", "__isoc99_sscanf", "__isoc23_sscanf",
        "strtok_r", "__strtok_r", "strcmp", "strncmp", "strlen", "memcmp", "memcpy", "memset",
        "__errno_location", "__stack_chk_fail",
    }, called  # fmt: skip
