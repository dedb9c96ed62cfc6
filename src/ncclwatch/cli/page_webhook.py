"""``serve --webhook``: the page posts what begins and ends, with links to itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclwatch.cli.otlp import in_the_clear
from ncclwatch.cli.output import note, plain
from ncclwatch.errors import UsageError

if TYPE_CHECKING:
    from ncclwatch.serve.board import Board
    from ncclwatch.serve.feed import Feed
    from ncclwatch.serve.webhook import Webhook

MAX_HEADER = 4096
_HEADER = re.compile(r"([A-Za-z0-9-]{1,64}):[ \t]*([\x20-\x7e]{1,4000}?)\s*\Z")

WebhookOption = Annotated[
    str | None,
    typer.Option("--webhook", metavar="URL", help="Post each verdict, and its end, there as JSON with a link to its moment."),
]
WebhookHeaderOption = Annotated[
    Path | None,
    typer.Option("--webhook-header-file", metavar="FILE", help="A file with one header, NAME: VALUE, for --webhook."),
]
UrlOption = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Where browsers reach the page, for links of --webhook.")
]


@contextmanager
def posting(url: str | None, header_file: Path | None, page: str) -> Iterator[Webhook | None]:
    """What posts to ``url``, if that was asked for; at the end what waits is posted, as far as it is taken."""
    if url is None:
        if header_file is not None:
            raise UsageError("--webhook-header-file belongs to --webhook", "give both, or neither")
        yield None
        return
    from ncclwatch.serve.webhook import Webhook, WebhookReceiver

    receiver = WebhookReceiver(url, _header(header_file) if header_file is not None else None)
    if in_the_clear(url):
        note(f"host names, pids and verdicts go to {receiver.url} in the clear: use https beyond networks of your own")
    hook = Webhook(receiver, page, lambda verdict: plain(verdict.to_json()))
    try:
        yield hook
    finally:
        hook.exporter.close()
        for line in hook.exporter.lines():
            note(line)


def heard_by(board: Board, hook: Webhook | None) -> None:
    """Let the webhook hear of every moment of jobs that are judged now."""

    def heard(feed: Feed) -> None:
        if hook is not None and feed.kind == "live" and feed.view is not None:
            hook.take(feed.job, feed.view.frame.verdicts)

    board.heard = heard


def _header(file: Path) -> tuple[str, str]:
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_HEADER).decode("ascii", "replace").splitlines()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", "give a file with one line, NAME: VALUE") from error
    found = _HEADER.match(text[0]) if text else None
    if found is None:
        raise UsageError(f"{file} holds no header", "write one line into it, like Authorization: Bearer TOKEN")
    return found[1], found[2]
