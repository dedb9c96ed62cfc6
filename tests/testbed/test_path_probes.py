"""Paths that a real job stands still on, probed by the collector itself between its hosts: dead, or alive."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from ncclwatch.cli.live import LiveSession
from ncclwatch.collect.paths import PathProbes
from ncclwatch.engine.evidence.work_requests import Shows
from ncclwatch.model.network import FlowRecord
from testbed.netns import Network
from testbed.sidecar import daemon, make_keys

pytestmark = [pytest.mark.attach]

VICTIM = 1
CASES = {"link-down": (False, Shows.NO_PATH), "silent-receiver": (True, Shows.PEER)}


def with_small_buffers(network: Network) -> Network:
    """Sockets that hold little: what a receiver does not take is soon under way, and its window full."""
    for host in network.hosts:
        small = "4096 16384 65536"
        assert host.popen(["sysctl", "-qw", f"net.ipv4.tcp_rmem={small}", f"net.ipv4.tcp_wmem={small}"]).wait(20) == 0
    return network


def until_told(session: LiveSession, shows: Shows, seconds: float) -> tuple[list[str], list[str], list[FlowRecord]]:
    """Step until a verdict shows what a probe found: its lines about probes, all notes, connections with answers."""
    notes: list[str] = []
    answered: list[FlowRecord] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        update = session.step(until=deadline)
        notes += update.notes
        answered += [flow for flow in update.flows if flow.path is not None]
        told = [line for line in session.verdict.evidence if "a probe of ours" in line] if session.verdict is not None else []
        if any(str(shows) in line for line in told):
            return told, notes, answered
    return told, notes, answered


@pytest.mark.parametrize("case", CASES)
def test_a_path_that_stands_still_is_probed_and_the_answer_is_in_the_verdict(case: str) -> None:
    alive, shows = CASES[case]
    fault = ("--fault", f"stall_proxy:rank={VICTIM},at=40") if alive else ()
    with ExitStack() as stack:
        network = with_small_buffers(stack.enter_context(Network(hosts=3)))
        job = stack.enter_context(network.job("2.27.5", 3, shape="allreduce", count=1 << 18, extra=fault))
        session = LiveSession(every=False, paths=PathProbes())
        stack.callback(session.close)
        session.start(job.pids, calls=False)
        session.step()
        if not alive:
            network.link(VICTIM).down()
        told, notes, answered = until_told(session, shows, 60)
        assert any(str(shows) in line for line in told), (session.verdict, notes, answered)
        assert any("probed, as ordered" in note for note in notes), notes
        path = answered[-1].path
        assert path is not None and path.alive == alive and path.kind == "tcp", answered
        assert session.verdict is not None and VICTIM in {culprit.rank for culprit in session.verdict.culprits}, session.verdict
        assert {plane.name for plane in session.planes if plane.running} >= {"paths"}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case == "link-down")) for case in CASES])
def test_agents_probe_by_themselves_what_a_hung_job_waits_on(case: str, tmp_path: Path) -> None:
    """Two hosts, an agent each, and nobody who asks or has allowed it: the verdict tells a dead path from a silent application.

    The engine is reached over a rail of its own, which stays up.
    """
    alive, shows = CASES[case]
    keys, port = make_keys(tmp_path / "keys"), 17405
    with ExitStack() as stack:
        network = with_small_buffers(stack.enter_context(Network(hosts=2, rails=2, containers=True)))
        address = f"tcp://10.78.1.254:{port}"
        engine = stack.enter_context(
            daemon("engine", "--bind", address, "--keys", str(keys), "--json", enter=network.switch.enter)
        )
        engine.wait_line("listening")
        fault = ("--fault", f"stall_proxy:rank={VICTIM},at=200") if alive else ()
        job = network.job("2.27.5", 2, shape="allreduce", count=1 << 18, extra=fault, env={"NCCL_SOCKET_IFNAME": "nic0"})
        stack.enter_context(job)
        agents = [
            stack.enter_context(daemon("agent", "--engine", address, "--keys", str(keys), "--all", enter=host.enter))
            for host in network.hosts
        ]
        for agent in agents:
            agent.wait_line("watching 1 processes")
        if not alive:
            network.link(VICTIM).down()

        def told() -> bool:
            found = [data["verdict"] for data in engine.objects("verdict")]
            lines = [line for verdict in found for line in verdict["evidence"] if "a probe of ours" in line]
            return any(str(shows) in line for line in lines)

        try:
            engine.wait(told, "what the probes found", 120)
        except AssertionError as error:
            raise AssertionError([agent.text for agent in agents]) from error
        assert any("probed, as ordered" in agent.text for agent in agents)
        last = engine.objects("verdict")[-1]["verdict"]
        (other,) = {shown for _, shown in CASES.values()} - {shows}
        assert not any(str(other) in line for line in last["evidence"]), last
        assert VICTIM in {culprit["rank"] for culprit in last["culprits"]}, last


def test_agents_probe_one_another_where_both_may(tmp_path: Path) -> None:
    """Two hosts with an agent each: the engine asks, an agent probes, the other answers, and the engine's verdict has it."""
    keys, secret, asked = make_keys(tmp_path / "keys"), tmp_path / "token", tmp_path / "ask"
    secret.write_text("sixteen bytes it is\n")
    secret.chmod(0o600)
    asked.touch()
    with ExitStack() as stack:
        network = with_small_buffers(stack.enter_context(Network(hosts=2, rails=2, containers=True)))
        address = "tcp://10.78.1.254:17403"
        options = ("--bind", address, "--keys", str(keys), "--json", "--ask-file", str(asked))
        engine = stack.enter_context(daemon("engine", *options, enter=network.switch.enter))
        engine.wait_line("listening")
        fault = ("--fault", f"stall_proxy:rank={VICTIM},at=200")
        environment = {"NCCL_SOCKET_IFNAME": "nic0"}
        job = network.job("2.27.5", 2, shape="allreduce", count=1 << 18, extra=fault, env=environment)
        stack.enter_context(job)
        agents = [
            stack.enter_context(
                daemon("agent", "--engine", address, "--keys", str(keys), "--all", "--probe-paths", str(secret), enter=host.enter)
            )
            for host in network.hosts
        ]

        def answered() -> bool:
            # Which side stands still, and what its probe then shows, depends on where the proxy was when it fell asleep.
            lines = [line for verdict in engine.ask(asked) for line in verdict["evidence"] if "a probe of ours" in line]
            return any("says ok: 3 of 3 answered" in line for line in lines)

        engine.wait(lambda: any("probed, as ordered" in agent.text for agent in agents), "a probe", 120)
        try:
            engine.wait(answered, "the answer of the other side", 60)
        except AssertionError as error:
            raise AssertionError([agent.text for agent in agents]) from error
