"""News of the network wake the collector, which otherwise sleeps until it is time for something."""

from __future__ import annotations

import threading
import time

from ncclwatch.collect.node import NodeCollector
from ncclwatch.stopping import Stop


class FakeNetwork:
    has_news = False


def collector(stop: Stop) -> tuple[NodeCollector, FakeNetwork]:
    made, network = NodeCollector(every=True, stop=stop), FakeNetwork()
    made.network = network  # type: ignore[assignment]
    return made, network


def test_news_end_the_sleep_at_once() -> None:
    stop = Stop()
    made, network = collector(stop)

    def later() -> None:
        time.sleep(0.1)
        network.has_news = True
        stop.wake()

    threading.Thread(target=later).start()
    began = time.monotonic()
    made._sleep(200.0)
    assert 0.05 < time.monotonic() - began < 100.0
    assert not stop.is_set()


def test_a_wake_without_news_does_not_cut_the_sleep_short() -> None:
    stop = Stop()
    made, _ = collector(stop)
    stop.wake()
    began = time.monotonic()
    made._sleep(0.2)
    assert time.monotonic() - began >= 0.2


def test_after_a_wake_the_end_is_still_heard() -> None:
    stop = Stop()
    stop.wake()
    assert not stop.wait(5.0)
    stop.set()
    assert stop.wait(5.0) and stop.wait(5.0)


class FakeCalls:
    filled = 0.0


def test_a_patient_collector_sleeps_to_the_next_look_but_not_past_a_full_ring() -> None:
    stop = Stop()
    made, calls = NodeCollector(every=True, stop=stop, patient=True, wake_s=0.05), FakeCalls()
    made.calls = calls  # type: ignore[assignment]
    began = time.monotonic()
    made._sleep(0.3)
    assert time.monotonic() - began >= 0.3
    calls.filled = 0.5
    began = time.monotonic()
    made._sleep(200.0)
    assert time.monotonic() - began < 100.0


def test_a_nudge_ends_the_sleep_once() -> None:
    stop = Stop()
    made, _ = collector(stop)
    threading.Timer(0.1, made.nudge).start()
    began = time.monotonic()
    made._sleep(200.0)
    assert time.monotonic() - began < 100.0
    began = time.monotonic()
    made._sleep(0.2)
    assert time.monotonic() - began >= 0.2
