"""Which surface a live session gets."""

from __future__ import annotations

import io
import sys

import pytest

from ncclwatch.cli.live_json import JsonSurface
from ncclwatch.cli.live_log import LogSurface
from ncclwatch.cli.showing import surface_of


class Terminal(io.StringIO):
    """A stream that a person sits before."""

    def __init__(self, encoding: str = "UTF-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return True


def sit_before(monkeypatch: pytest.MonkeyPatch, terminal: Terminal, term: str = "xterm-256color") -> None:
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", term)


def test_a_terminal_gets_the_dashboard_unless_something_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sit_before(monkeypatch, Terminal())
    assert surface_of(as_json=False, plain=False) is None
    assert isinstance(surface_of(as_json=False, plain=True), LogSurface)
    assert isinstance(surface_of(as_json=True, plain=False), JsonSurface)


@pytest.mark.parametrize(("encoding", "term"), [("ascii", "xterm"), ("UTF-8", "dumb")])
def test_a_terminal_that_cannot_draw_gets_lines(encoding: str, term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sit_before(monkeypatch, Terminal(encoding), term)
    assert isinstance(surface_of(as_json=False, plain=False), LogSurface)


def test_a_pipe_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(surface_of(as_json=False, plain=False), LogSurface)
