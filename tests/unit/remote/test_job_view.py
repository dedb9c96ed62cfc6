"""What an engine sends to viewers of a job, read back: a recorded job of real NCCL, judged again."""

from __future__ import annotations

from pathlib import Path

from ncclwatch.remote.iterations import MAX_ITERATIONS
from ncclwatch.remote.job_view import ViewReader, ViewWriter
from ncclwatch.store.replay import Recordings, Replay

SLOW = Path(__file__).parents[2] / "fixtures/jobs/drawn-801-28-slow-loader-2.32.3-shm-live-0.ncclwatch"


def test_iterations_of_a_slow_job_reach_a_viewer() -> None:
    writer, reader, decoded = ViewWriter("engine"), ViewReader(), None
    with Recordings([SLOW]) as recordings:
        replay = Replay(recordings)
        for time_ns, update in replay.updates():
            payload = writer.encode(replay, update, [b"viewer"], interval_s=1.0, behind_s=0.0)
            decoded = reader.decode(payload)
            assert decoded is not None
            # None from the future, but for the error of a clock that is set anew at each look.
            assert all(end <= time_ns / 1e9 + 1.5 for end, _ in decoded[0].iterations)
        assert decoded is not None
        view, _, shown = decoded
    assert view.iterations == replay.iterations
    assert 0 < len(view.iterations) <= MAX_ITERATIONS
    assert [end for end, _ in view.iterations] == sorted(end for end, _ in view.iterations)
    # As the verdict says: 0.74 s instead of 0.38 s.
    durations = [took for _, took in view.iterations]
    assert min(durations) < 0.43
    assert 0.6 < durations[-1] < 0.9
    assert "0.74 s instead of 0.38 s" in shown.verdicts[0].summary
    assert view.roles == replay.roles
    assert view.layout == replay.layout
