"""``ncclwatch tuning``: what people and scripts read."""

from __future__ import annotations

import pytest

from ncclwatch.cli import tuning as command
from ncclwatch.cli.main import run
from ncclwatch.errors import ExitStatus, UsageError
from ncclwatch.knowledge.tuning import advise
from ncclwatch.text import Style
from unit.knowledge.test_tuning import flow, look


@pytest.mark.parametrize(
    ("text", "expected"), [("25gbit", 3.125e9), ("100 Gbit/s", 12.5e9), ("800Mbps", 1e8), ("3.1GB", 3.1e9), ("5000000B/s", 5e6)]
)
def test_rates_as_people_write_them(text: str, expected: float) -> None:
    assert command.link_rate(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "0gbit", "fast", "25", "-1gbit", "9" * 50 + "gbit"])
def test_what_is_no_rate_is_said_in_a_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError):
        command.link_rate(text)
    assert run(["tuning", "--all", f"--link={text}"]) == ExitStatus.USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_an_advice_says_what_was_seen_what_to_try_and_what_it_gains() -> None:
    seen = look(flow(), settings={"NCCL_MAX_NCHANNELS": "1"})
    text = "\n".join(command.lines(seen, advise(seen), Style(enabled=False)))
    assert "10%, while operations move (100% of the time): not full" in text
    assert "try    raise NCCL_MAX_NCHANNELS=1" in text
    assert "gains  operations 8.0 times as fast, the job at most 88% shorter, if it is the connection that limits" in text


def test_a_job_without_a_network_has_nothing_to_tune() -> None:
    seen = look()
    assert "nothing to tune" in "\n".join(command.lines(seen, [], Style(enabled=False)))


def test_the_json_names_capacity_and_where_it_is_from() -> None:
    seen = look(flow())
    (told,) = command._json(seen, advise(seen))["links"]
    assert (told["capacity_from"], told["fill"]) == ("told", pytest.approx(0.1))
    assert told["advice"][0]["communicator"] == "7"
