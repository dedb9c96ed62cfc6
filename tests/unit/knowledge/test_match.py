"""Verdicts and the rows that fit them: on recordings, and on what is like them and must not fit."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from ncclwatch.cli.diagnose import judge
from ncclwatch.knowledge.match import MOST, MOST_DEFECTS, advised
from ncclwatch.knowledge.rows import rows
from ncclwatch.model.verdict import CommunicatorRef, Culprit, Verdict, VerdictClass, schema
from ncclwatch.store.container import is_recording
from ncclwatch.store.replay import Recordings, Replay

FIXTURES = Path(__file__).parents[2] / "fixtures"
STOPPED = "its process is stopped by a signal"

SNAPSHOTS = {
    "hung-2.27.5-socket-rank2.ncclwatch": "stopped-by-signal",
    "jobs/deadlock-of-four-2.32.3-shm-post-hang-0.ncclwatch": "order-of-communicators",
    "jobs/drawn-802-80-skip-2.21.5-shm-post-hang-0.ncclwatch": "left-out",
    "jobs/drawn-801-51-gpu-stall-2.27.5-socket-post-hang-0.ncclwatch": "gpu-not-begun",
    "jobs/drawn-801-86-other-operation-2.21.5-shm-post-hang-0.ncclwatch": "calls-differ",
    "jobs/drawn-1303-209-init-2.27.5-shm-post-hang-0.ncclwatch": "rendezvous",
    "jobs/drawn-802-112-never-enters-2.27.5-shm-post-hang-0.ncclwatch": "late-host",
    "jobs/drawn-801-27-link-down-2.27.5-socket-post-hang-0.ncclwatch": "path-dead",
}
"""Recordings that rows cite, with the row that must come with their verdict."""


def _of(name: str, tmp_path: Path) -> list[Verdict]:
    path = FIXTURES / name
    if not path.exists():
        packed = path.with_name(path.name + ".xz")
        path = tmp_path / path.name
        path.write_bytes(lzma.decompress(packed.read_bytes()))
    if not is_recording(path):
        return judge([], [path], every=False, wait=5.0, interval=1.0)[0]
    with Recordings([path]) as recordings:
        replay = Replay(recordings)
        for _ in replay.updates():
            pass
        return list(replay.verdicts)


@pytest.mark.parametrize(("name", "row"), SNAPSHOTS.items())
def test_a_recording_is_explained_by_the_row_that_cites_it(name: str, row: str, tmp_path: Path) -> None:
    verdict = _of(name, tmp_path)[0]
    assert row in [advice.row for advice in verdict.knowledge], verdict.summary
    (known,) = (one for one in rows() if one.id == row)
    if row != "stopped-by-signal":
        assert any(name.removesuffix(".ncclwatch") in source for source in known.sources)
    jsonschema.validate(verdict.to_json(), schema())


def _verdict(kind: VerdictClass, reason: str = "", nranks: int = 4, **more: object) -> Verdict:
    culprit = Culprit(2, 2, "node1", 4711, 0, reason=reason)
    return replace(Verdict(kind, "", (culprit,), communicator=CommunicatorRef("0" * 16, nranks)), **more)  # type: ignore[arg-type]


def test_steps_name_the_culprit() -> None:
    found = advised(_verdict(VerdictClass.STOPPED, STOPPED))
    assert found.knowledge[0].do[0] == "`kill -CONT 4711` on node1 lets it go on"


@pytest.mark.parametrize(
    ("release", "arch", "known"),
    [
        ((2, 28, 9), "aarch64", True),
        ((2, 29, 2), "aarch64", True),
        ((2, 29, 3), "aarch64", False),
        ((2, 28, 9), "x86_64", False),
        ((2, 28, 9), "", False),
    ],
)
def test_the_leak_of_proxy_slots_is_of_weakly_ordered_cpus_before_2_29_3(
    release: tuple[int, int, int], arch: str, known: bool
) -> None:
    found = advised(_verdict(VerdictClass.NOT_ENTERED, "has not entered the operation the others wait in"), [release], arch)
    assert ("proxy-slots-leak" in [advice.row for advice in found.knowledge]) is known


def test_a_healthy_job_and_one_without_a_known_release_get_no_defects() -> None:
    assert advised(_verdict(VerdictClass.RUNNING), [(2, 18, 1)], "aarch64").knowledge == ()
    assert not any(advice.defect for advice in advised(_verdict(VerdictClass.INIT_HANG)).knowledge)


def test_what_is_carried_is_bounded_and_causes_come_before_defects() -> None:
    found = advised(_verdict(VerdictClass.INIT_HANG, nranks=512), [(2, 18, 1)], "aarch64").knowledge
    assert len(found) <= MOST
    assert [advice.defect for advice in found] == sorted(advice.defect for advice in found)
    assert sum(advice.defect for advice in found) == MOST_DEFECTS


def test_a_session_advises_each_verdict_once_and_keeps_them_one_object() -> None:
    with Recordings([FIXTURES / "stopped-8-ranks.recording"]) as recordings:
        replay = Replay(recordings)
        told = [(update, list(replay.verdicts)) for _, update in replay.updates() if update.told]
    (update, standing), *_ = told
    assert update.told[0].knowledge[0].row == "stopped-by-signal"
    assert any(verdict is update.told[0] for verdict in update.verdicts)
    assert any(verdict is update.told[0] for verdict in standing)
