"""Windows of work: added up, in words, and as a view shows them."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.engine.session import DiagnosisSession, Update
from ncclwatch.model.state import Direction
from ncclwatch.model.work import Counting, FlowWindow, Scope, WorkWindow, added
from ncclwatch.view.builder import ViewBuilder
from ncclwatch.view.frame import View
from ncclwatch.view.work_text import work_line
from unit.screens import screen
from unit.synthetic import SECOND, WORLD
from unit.views import view

BURST = WorkWindow(
    Counting.BURSTS, 10 * SECOND, 17 * SECOND, 0.007, posted=14, posted_bytes=14 << 20, completed=12, completed_bytes=12 << 20,
    received=0, received_bytes=0, receives_posted=0, in_flight=2, oldest_s=0.0004, latency_p50_ns=24e3, latency_p99_ns=95e3,
    throughput=2e9, uncertainty=0.03, send_rate=0.125,
)  # fmt: skip


def peer(rank: int, other: int, latency_ns: float) -> FlowWindow:
    work = replace(BURST, latency_p50_ns=latency_ns)
    return FlowWindow(
        1000 + rank, Scope.PEER, work, global_rank=rank, comm_hash=WORLD << 40, rank=rank, peer=other, host=f"node{rank // 8:03d}"
    )


def test_coverage_and_rates_are_of_the_time_that_was_seen() -> None:
    assert BURST.coverage == 0.001
    assert BURST.bytes_per_s == (14 << 20) / 0.007
    unseen = replace(BURST, seen_s=0.0, posted_bytes=0)
    assert (unseen.coverage, unseen.bytes_per_s, unseen.received_per_s) == (0.0, None, None)
    assert replace(BURST, begin_ns=5, end_ns=5).coverage == 0.0


def test_windows_of_several_flows_are_one() -> None:
    slower = replace(
        BURST, posted_bytes=2 << 20, seen_s=0.005, latency_p50_ns=50e3, uncertainty=0.1, send_rate=0.1, oldest_s=None
    )
    both = added([BURST, slower])
    assert both is not None
    assert (both.posted, both.posted_bytes, both.in_flight, both.completed) == (28, 16 << 20, 4, 24)
    assert (both.seen_s, both.latency_p50_ns, both.oldest_s, both.throughput, both.send_rate) == (0.005, 50e3, 0.0004, 4e9, 0.1)
    assert both.uncertainty is not None and 0.02 < both.uncertainty < 0.04
    assert added([]) is None
    unknown = added([BURST, replace(BURST, uncertainty=None)])
    assert unknown is not None and unknown.uncertainty is None


def test_what_counts_no_requests_tells_of_none() -> None:
    socket = WorkWindow(Counting.TCP, 0, 2 * SECOND, 2.0, posted_bytes=8, completed_bytes=8, throughput=9.0, uncertainty=0.0)
    taking = replace(socket, posted_bytes=0, completed_bytes=0, received_bytes=8, throughput=5.0)
    both = added([socket, taking])
    assert both is not None
    # What is received is no throughput of what is sent.
    assert (both.posted, both.in_flight, both.latency_p99_ns, both.throughput) == (None, None, None, 9.0)
    assert (
        work_line(both) == "sent 4 B/s, received 4 B/s, 9 B/s while there was something to send; seen 100% of 2.0s, by the kernel"
    )


def test_a_window_in_words() -> None:
    assert work_line(BURST) == (
        "sent 2.0 GiB/s ±3%, 1.9 GiB/s over the last 64 completions, 2 in flight, latency 24 µs (p99 95 µs); "
        "seen 0.1% of 7.0s, in bursts of probes"
    )


def test_a_view_keeps_the_newest_window_of_everything_until_it_is_of_long_ago() -> None:
    builder, session = ViewBuilder(), DiagnosisSession()
    old = FlowWindow(7, Scope.PORT, BURST, global_rank=3, device="mlx5_0", port=1, host="a")
    newer = replace(old, work=replace(BURST, begin_ns=17 * SECOND, end_ns=20 * SECOND))
    other = replace(old, pid=8, global_rank=1)
    elsewhere = replace(old, host="b", global_rank=None)

    def shown(*windows: FlowWindow) -> View:
        update = Update(0, work=list(windows))
        update.windows = []
        found = builder.feed(session, update, 0.0)
        assert found is not None
        return found

    assert shown().frame.work is None
    assert shown(old, other, elsewhere).ports == [other, old, elsewhere]
    assert shown(newer).ports == [other, newer, elsewhere]
    late = replace(newer, work=replace(BURST, end_ns=100 * SECOND))
    # The other host's clock is its own.
    assert shown(late).ports == [late, elsewhere]


def test_completion_latencies_from_rank_to_rank_and_their_picture() -> None:
    base = view(8)
    work = [peer(rank, (rank + 1) % 8, 20e3 if rank != 5 else 100e3) for rank in range(8)]
    work.append(replace(peer(2, 3, 5e6), host="elsewhere"))
    shown = View(replace(base.frame, work=work))
    assert shown.latencies == {(rank, (rank + 1) % 8): 20e3 if rank != 5 else 100e3 for rank in range(8)}
    lines = screen([shown], (120, 40), "7", "l").splitlines()
    title = next(line for line in lines if "rows send to columns" in line)
    assert "a digit is how many times 20 µs, the median; slowest 5 to 6: 100 µs; l: waits" in title
    row = next(line for line in lines if line.startswith("    5 "))
    assert row.split()[1:] == ["·", "·", "·", "·", "·", "·", "5", "·"]
    assert "rows wait for columns" in screen([shown], (120, 40), "7", "l", "l")
    nothing = screen([base], (120, 40), "7", "l")
    assert "no completion of a request, and no round trip, was seen" in nothing


def test_a_flow_shows_its_window() -> None:
    from unit.dashboard.test_goldens import with_network

    base = with_network(view(8))
    flows = [replace(row, work=BURST) for row in base.frame.flows or ()]
    lines = screen([View(replace(base.frame, flows=flows))], (200, 60), "5").splitlines()
    heading = next(line for line in lines if "LATENCY" in line)
    assert heading.index("LATENCY") < heading.index("P99") < heading.index("FLIGHT") < heading.index("SEEN")
    row = lines[lines.index(heading) + 1]
    assert "95 µs" in row and "0.1%" in row


def test_direction_tells_connections_apart() -> None:
    send = FlowWindow(7, Scope.FLOW, BURST, comm_hash=1, rank=0, channel=0, peer=1, direction=Direction.SEND, queue_pair=5)
    assert send.place != replace(send, direction=Direction.RECV).place != replace(send, host="b").place
