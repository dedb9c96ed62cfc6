"""Accounts of work requests against what a provider of our own counted itself: exact to the request and the byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest

from ncclwatch.model.state import VersionSource
from ncclwatch.target.layout import Layout
from ncclwatch.target.memory import LiveReader
from ncclwatch.wire.contexts import find_contexts, find_queues
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.sites import data_path_sites
from wire.standin import Load, load

pytestmark = pytest.mark.attach


@contextmanager
def watched(kernel: WireKernel, job: Load, *, exact: bool = True, extended: bool = False) -> Iterator[None]:
    reader = LiveReader(job.pid)
    try:
        contexts = find_contexts(reader, job.files)
        pairs, queues = find_queues(reader, contexts) if extended else ([], [])
        sites = data_path_sites(job.pid, reader.mappings(), contexts, pairs, queues, exact=exact)
    finally:
        reader.close()
    attached = kernel.attach(sites)
    try:
        yield
    finally:
        kernel.detach(attached)


def accounts(kernel: WireKernel, job: Load) -> dict[int, npt.NDArray[Any]]:
    keys, values = kernel.queue_pairs()
    return {int(key["qp_num"]): value for key, value in zip(keys, values, strict=True) if key["pid"] == job.pid}


@pytest.mark.parametrize(
    "options",
    [
        {"posts": 23},
        {"posts": 1009, "chain": 8, "pieces": 5, "qps": 3},
        {"posts": 1009, "chain": 2, "qps": 4, "cqs": 2, "contexts": 2, "signal_every": 5},
        {"posts": 1009, "chain": 3, "qps": 2, "refuse_every": 7, "error_every": 13, "receives": 5},
        {"posts": 509, "extended": 1, "chain": 3, "pieces": 2, "qps": 2},
        {"posts": 509, "extended": 1, "chain": 2, "abort_every": 10},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
def test_accounts_are_exact(wire_kernel: WireKernel, load_program: Path, options: dict[str, int]) -> None:
    with load(load_program, **options) as job, watched(wire_kernel, job, extended=bool(options.get("extended"))):
        job.begin()
        expected = job.result()
        found = accounts(wire_kernel, job)
        assert sorted(found) == [pair["number"] for pair in expected["qps"]]
        for pair in expected["qps"]:
            account = found[pair["number"]]
            posted = {
                "posted": pair["posted"],
                "posted_bytes": pair["bytes"],
                "signalled": pair["signalled"],
                "refused": pair["refused"],
                "errors": pair["errors"],
                "receives_posted": pair["receives"],
                "received": pair["received"],
                "completed": pair["signalled"],
                "unmatched": 0,
                "skipped": 0,
                "overwritten": 0,
                "truncated": 0,
            }
            assert {name: int(account[name]) for name in posted} == posted
            assert account["head"] == account["tail"] == pair["signalled"]
            assert account["latency"].sum() == pair["signalled"]
            assert account["status_count"][12] == pair["errors"]
            if options.get("signal_every", 1) == 1 and not pair["refused"]:
                assert (int(account["retired"]), int(account["retired_bytes"])) == (pair["posted"], pair["bytes"])
            if not options.get("abort_every"):
                assert (account["opcode_count"].sum(), account["opcode_bytes"].sum()) == (pair["posted"], pair["bytes"])
    assert set(wire_kernel.counters().values()) == {0}


def test_contexts_of_several_devices_are_found_in_memory(load_program: Path) -> None:
    with load(load_program, contexts=3, cqs=3, qps=6) as job:
        reader = LiveReader(job.pid)
        contexts = find_contexts(reader, job.files)
        pairs, queues = find_queues(reader, contexts)
        reader.close()
        assert [context.address for context in contexts] == sorted(job.addresses)
        assert {context.device for context in contexts} == {"standin0", "standin1", "standin2"}
        assert sorted(pair.number for pair in pairs) == list(range(100, 106))
        assert len(queues) == 3


def test_memory_is_not_searched_at_first_where_nccl_tells_a_context(load_program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(load_program, contexts=2, cqs=2, qps=2) as job:
        reader = LiveReader(job.pid)
        monkeypatch.setattr("ncclwatch.wire.contexts._nccl_devices", lambda *_: [(job.addresses[1], 1)])
        layout = Layout("", None, VersionSource.BUILD_ID, {}, {}, {})
        known = find_contexts(reader, job.files, layout, quick=True)
        assert [(context.address, context.found_by, context.port) for context in known] == [(job.addresses[1], "nccl", 1)]
        assert len(find_contexts(reader, job.files, layout)) == 2
        assert len(find_contexts(reader, job.files, quick=True)) == 2, "nobody tells one"
        reader.close()


def test_a_context_of_no_open_device_is_not_believed(load_program: Path) -> None:
    with load(load_program) as job:
        reader = LiveReader(job.pid)
        assert find_contexts(reader, []) == []
        reader.close()


def test_detached_probes_count_nothing(wire_kernel: WireKernel, load_program: Path) -> None:
    with load(load_program, posts=101) as job:
        with watched(wire_kernel, job):
            pass
        job.begin()
        assert job.result()["qps"][0]["posted"] == 101
        assert accounts(wire_kernel, job) == {}


def test_a_burst_begins_with_nothing_in_flight(wire_kernel: WireKernel, load_program: Path) -> None:
    """What was posted before a burst is never differenced into "in flight"."""
    with load(load_program, posts=31, stall_after=11) as job, watched(wire_kernel, job):
        job.begin()
        job.result()
        before = accounts(wire_kernel, job)[100]
        assert before["tail"] - before["head"] >= 20
    wire_kernel.new_generation()
    with load(load_program, posts=7) as other, watched(wire_kernel, other):
        other.begin()
        other.result()
        after = accounts(wire_kernel, other)[100]
        assert after["head"] == after["tail"] == 7
        assert after["generation"] == before["generation"] + 1
