"""The page's addresses: the page itself, the stream of what changes, moments that have passed, one rank."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from ncclwatch import __version__
from ncclwatch.errors import NcclwatchError
from ncclwatch.serve.access import Gate, Rules
from ncclwatch.serve.board import MAX_READERS, Board
from ncclwatch.serve.feed import Feed
from ncclwatch.serve.moment import TROUBLE
from ncclwatch.serve.rank import rank_detail

if TYPE_CHECKING:
    from ncclwatch.serve.remembered import Remembered

TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}
_WRONG = re.compile(r'<p id="wrong".*?</p>\n')
_encode = msgspec.json.Encoder().encode


class Page:
    """Answers requests about the jobs of a board."""

    def __init__(self, board: Board, remembered: Remembered | None = None) -> None:
        self._board, self._remembered = board, remembered

    def routes(self, files: dict[str, bytes]) -> list[Route]:
        """Every address."""
        found = [
            Route("/api/jobs", self.jobs),
            Route("/api/events", self.events),
            Route("/api/timeline", self.timeline),
            Route("/api/moment", self.moment),
            Route("/api/rank", self.rank),
            Route("/api/about", lambda _request: _json({"history": self._remembered is not None})),
            Route("/api/nodes", self.nodes),
            Route("/api/node", self.node),
            Route("/healthz", lambda _request: PlainTextResponse("ok\n")),
            Route("/", _file("text/html", files["index.html"])),
            Route("/login", _login(files["login.html"].decode())),
        ]
        return found + [Route(f"/{name}", _file(_type(name), data)) for name, data in files.items() if not name.endswith(".html")]

    async def jobs(self, _request: Request) -> Response:
        """All jobs, as the list has them."""
        return _json({"version": __version__, "trouble": TROUBLE, "jobs": [f.summary() for f in self._board.feeds.values()]})

    async def events(self, request: Request) -> Response:
        """What changes, as server-sent events: of the list, and of one job."""
        if self._board.readers >= MAX_READERS:
            return _error(503, "as many look at this as can be served: close a tab somewhere")
        stream = self._board.stream(request.query_params.get("job", ""))
        # Proxies that gather what passes would hold it back.
        return StreamingResponse(stream, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def timeline(self, request: Request) -> Response:
        """Every moment that is kept of a job, as points."""
        feed = self._feed(request)
        return _error(404, "no such job") if feed is None else _json({"job": feed.job, "points": feed.past.points()})

    async def moment(self, request: Request) -> Response:
        """The moment of a job at a time: the last that is kept before it."""
        feed, time = self._feed(request), _number(request, "t")
        if feed is None:
            return _error(404, "no such job")
        if time is None:
            return _error(400, "t is to be seconds since the epoch")
        data = await asyncio.to_thread(feed.past.at, time)
        return _error(404, "nothing is known of this job yet") if data is None else Response(data, media_type="application/json")

    async def rank(self, request: Request) -> Response:
        """One rank in full, as it is now."""
        feed, number = self._feed(request), _number(request, "rank")
        if feed is None or number is None:
            return _error(404, "no such job or rank")
        view = feed.view
        found = await asyncio.to_thread(rank_detail, view, int(number)) if view is not None else None
        return _error(404, "no process of this rank is observed") if found is None else _json(found)

    async def nodes(self, _request: Request) -> Response:
        """Nodes that were blamed, by the history that is kept."""
        return await self._past(lambda remembered: remembered.nodes())

    async def node(self, request: Request) -> Response:
        """One node: when and for what it was blamed."""
        name = request.query_params.get("node", "")
        return await self._past(lambda remembered: remembered.node(name)) if name else _error(400, "no node is named")

    async def _past(self, question: Callable[[Remembered], dict[str, Any]]) -> Response:
        if self._remembered is None:
            return _error(404, "this page was given no history: start it with --history")
        try:
            return _json(await asyncio.to_thread(question, self._remembered))
        except NcclwatchError as error:
            return _error(503, str(error))

    def _feed(self, request: Request) -> Feed | None:
        return self._board.feeds.get(request.query_params.get("job", ""))


def application(
    feeds: Sequence[Feed],
    rules: Rules,
    ended: Callable[[Board], None] = lambda _board: None,
    remembered: Remembered | None = None,
) -> ASGIApp:
    """The whole of it, for a server of ASGI; ``ended`` is given the board when it begins, to end its streams from outside."""
    board = Board(feeds)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        board.start()
        ended(board)
        try:
            yield
        finally:
            await board.stop()

    return Gate(Starlette(routes=Page(board, remembered).routes(_files()), lifespan=lifespan), rules)


def _files() -> dict[str, bytes]:
    """The files of the page by name."""
    folder = resources.files("ncclwatch.serve").joinpath("page")
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.rpartition(".")[2] in TYPES}


def _type(name: str) -> str:
    return TYPES[name.rpartition(".")[2]]


def _file(kind: str, data: bytes) -> Callable[[Request], Response]:
    return lambda _request: Response(data, media_type=kind)


def _login(page: str) -> Callable[[Request], Response]:
    """The form: where to go from it, and that the last token was wrong. Both are text of whoever made the link."""

    def answer(request: Request) -> Response:
        following = escape(request.query_params.get("next", "/"), quote=True)
        shown = page.replace('name="next" type="hidden" value="/"', f'name="next" type="hidden" value="{following}"')
        return Response(shown if "wrong" in request.query_params else _WRONG.sub("", shown), media_type="text/html")

    return answer


def _number(request: Request, name: str) -> float | None:
    try:
        value = float(request.query_params.get(name, ""))
    except ValueError:
        return None
    return value if abs(value) < 1e12 else None


def _json(data: object) -> Response:
    return Response(_encode(data), media_type="application/json")


def _error(status: int, text: str) -> Response:
    return Response(_encode({"error": text}), status, media_type="application/json")
