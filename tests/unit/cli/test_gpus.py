"""gpus: what is wrong is said in words; beside a verdict only of the culprit's GPU, and a driver that fails changes nothing."""

from __future__ import annotations

import socket

import pytest

from ncclwatch.cli import main
from ncclwatch.cli.gpus import beside
from ncclwatch.model.gpu import GpuHealth, GpuLook
from ncclwatch.model.verdict import Culprit, Ticket, Verdict, VerdictClass

HOST = socket.gethostname()
LOOK = GpuLook(
    driver="550",
    gpus=tuple(
        GpuHealth(index=n, bus_id=f"0000:1{n}:00.0", name="H100", ecc_uncorrected=2 * (n == 1), reasons=("SwPowerCap",))
        for n in range(3)
    ),
)


def verdict(*buses: str, host: str = HOST, kind: VerdictClass = VerdictClass.HARDWARE) -> Verdict:
    culprits = tuple(Culprit(n, n, host, 100 + n, 0, ticket=Ticket(gpu_bus=bus)) for n, bus in enumerate(buses))
    return Verdict(kind, "somebody holds the job up", culprits)


def asked(*verdicts: Verdict, look: GpuLook = LOOK) -> tuple[list[Verdict], int]:
    times: list[float] = []

    def tell(timeout_s: float) -> GpuLook:
        times.append(timeout_s)
        return look

    return beside(verdicts, tell), len(times)


def test_the_culprits_gpu_is_told_and_the_row_that_speaks_of_it_comes_first() -> None:
    (told,), _ = asked(verdict("0000:10:00.0", "0000:11:00.0"))
    assert [one.gpu_trouble for one in told.culprits] == [(), ("ecc-uncorrected",)]
    assert told.evidence == (
        "rank 0: GPU 0 (0000:10:00.0): nothing is wrong with it, as far as its driver says",
        "rank 1: GPU 1 (0000:11:00.0): 2 uncorrected memory errors since the driver was loaded",
    )
    assert told.knowledge[0].row == "gpu-memory"


def test_the_driver_is_asked_once_and_only_where_somebody_of_this_node_is_named() -> None:
    two = verdict("0000:11:00.0")
    assert asked(two, two)[1] == 1
    for other in (
        verdict("0000:11:00.0", host="elsewhere"), verdict("0000:11:00.0", kind=VerdictClass.UNKNOWN),
        verdict("0000:11:00.0", kind=VerdictClass.STOPPED), verdict(""),
    ):  # fmt: skip
        assert asked(other) == ([other], 0)


def test_a_driver_that_does_not_answer_is_not_observed() -> None:
    (told,), _ = asked(verdict("0000:11:00.0"), look=GpuLook(problem="no driver"))
    assert told.unobserved == ("the state of GPUs: no driver",)
    assert told.culprits == verdict("0000:11:00.0").culprits and told.evidence == ()


def test_a_gpu_that_the_driver_does_not_list_says_nothing() -> None:
    (told,), _ = asked(verdict("0000:77:00.0"))
    assert told.evidence == ()


def test_the_command_shows_a_table_and_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("ncclwatch.gpu.health.look_at_gpus", lambda: LOOK)
    assert main.run(["gpus"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].split() == ["1", "0000:11:00.0", "H100", "2", "ecc-uncorrected"]
    assert out.endswith("GPU 1: 2 uncorrected memory errors since the driver was loaded\n")
    monkeypatch.setattr("ncclwatch.gpu.health.look_at_gpus", lambda: GpuLook(problem="no driver"))
    assert main.run(["gpus"]) == 3
    assert capsys.readouterr().err.startswith("ncclwatch: error: no GPU can be asked: no driver: ")
