"""``ncclwatch serve``: what ``top`` shows, of one job or many, as a page for browsers; and recordings with a timeline."""

from __future__ import annotations

import ipaddress
import re
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclwatch.cli.options import DurationOption, KeysOption
from ncclwatch.cli.output import emit, note
from ncclwatch.cli.page_webhook import UrlOption, WebhookHeaderOption, WebhookOption, heard_by, posting
from ncclwatch.errors import NcclwatchError, UsageError
from ncclwatch.stopping import Stop, stop_on_signals
from ncclwatch.text import clean

if TYPE_CHECKING:
    from threading import Thread

    from ncclwatch.serve.access import Rules
    from ncclwatch.serve.board import Board
    from ncclwatch.serve.feed import Feed
    from ncclwatch.serve.remembered import Remembered
    from ncclwatch.serve.server import Certificate
    from ncclwatch.serve.webhook import Webhook

MAX_JOBS = 256
"""Jobs that are followed at most: each is a connection to an engine."""
MAX_JOBS_FILE = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:-]{0,79}")
_FIELDS = {"name", "engine", "token", "keys"}


@dataclass(frozen=True, slots=True)
class Watched:
    """One job of an engine, as it was asked for."""

    engine: str
    token: str = ""
    name: str = ""
    keys: Path | None = None


EnginesOption = Annotated[
    list[str] | None, typer.Option("--engine", "-e", metavar="ADDRESS", help="An engine to watch: tcp://HOST:PORT; several.")
]
JobsFileOption = Annotated[
    Path | None, typer.Option("--jobs", metavar="FILE", help="Jobs as TOML: [[job]] with name, engine, token, keys.")
]
TokensOption = Annotated[
    list[str] | None,
    typer.Option("--job", metavar="[NAME=]TOKEN", help="A job of the engines, by its token ('ncclwatch keys token'); several."),
]
FleetOption = Annotated[
    str | None,
    typer.Option("--fleet", metavar="ADDRESS", help="All jobs of a fleet, by its NATS server; needs an engine's key of it."),
]
RecordingsOption = Annotated[
    list[Path] | None,
    typer.Option("--recording", metavar="PATH", help="A recording, or a folder with those of one job's nodes; several."),
]

BindOption = Annotated[
    str, typer.Option("--bind", "-b", metavar="[ADDRESS]:PORT", help="Where to serve; 127.0.0.1 if no address is given.")
]
HostsOption = Annotated[
    list[str] | None, typer.Option("--host", metavar="NAME", help="A name by which browsers reach the page; several.")
]
TokenFileOption = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="Who gives the token in this file is let in.")
]
UserHeaderOption = Annotated[
    str | None, typer.Option("--user-header", metavar="NAME", help="Who has this header, set by a proxy, is let in.")
]
ProxiesOption = Annotated[
    list[str] | None, typer.Option("--proxy", metavar="ADDRESS", help="From where --user-header is believed; several.")
]
HistoryFolderOption = Annotated[
    str | None,
    typer.Option("--history", metavar="FOLDER", help="Show what a history knows of nodes: the folder, or s3://BUCKET/PATH."),
]


def serve(
    engine: EnginesOption = None,
    job: TokensOption = None, jobs: JobsFileOption = None, fleet: FleetOption = None, keys: KeysOption = None,
    recording: RecordingsOption = None,
    bind: BindOption = ":8711", host: HostsOption = None,
    token_file: TokenFileOption = None, user_header: UserHeaderOption = None, proxy: ProxiesOption = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate with its chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its key, PEM.")] = None,
    history: HistoryFolderOption = None,
    webhook: WebhookOption = None, webhook_header_file: WebhookHeaderOption = None, url: UrlOption = None,
    duration: DurationOption = None,
) -> None:  # fmt: skip
    """Serve a page for browsers: all jobs, each with its verdict, ranks, waits and timeline. It can only be read.

    \b
    Examples:
      ncclwatch serve --engine tcp://127.0.0.1:7311             the job without a token
      ncclwatch serve --fleet nats://127.0.0.1:4222             all jobs of a fleet
      ncclwatch serve --recording job.recording                 a timeline to scrub
      ncclwatch serve --jobs jobs.toml --token-file token --bind 0.0.0.0:8711 --tls-cert page.pem --tls-key page.key
    """
    from ncclwatch.cli.metrics import parse_address

    _require_packages()
    from ncclwatch.serve.server import bind as bind_socket
    from ncclwatch.serve.server import serving

    address, port = parse_address(bind, what="the page", any_port=True)
    certificate = _certificate(tls_cert, tls_key)
    rules = _rules(address, token_file, user_header, proxy or [], host or [], secure=certificate is not None)
    alone = not recording and fleet is None
    feeds = [*_recorded(recording or []), *_live(_watched(engine or [], job or [], jobs, keys, alone=alone))]
    if len(feeds) > MAX_JOBS:
        raise UsageError(f"{len(feeds)} jobs are more than the {MAX_JOBS} that one page follows", "start another")
    stop = stop_on_signals()
    listener = bind_socket(address, port)
    follow = _fleet(fleet, keys, stop) if fleet is not None else lambda _board: None
    here, past = _url(address, listener.getsockname()[1], secure=certificate is not None), _remembered(history)
    with posting(webhook, webhook_header_file, url or here) as hook:

        def begun(board: Board) -> None:
            heard_by(board, hook)
            follow(board)

        with serving(feeds, rules, listener, certificate, begun, past) as thread:
            names = "all jobs of the fleet" if fleet is not None else f"{len(feeds)} job{'s' if len(feeds) != 1 else ''}"
            emit(f"serving {names} on {here}  (Ctrl-C ends it)")
            if not rules.asks:
                note("everybody on this machine can read it: --token-file asks for a token")
            _wait(thread, stop, duration, hook)


def _url(address: str, port: int, *, secure: bool) -> str:
    return f"{'https' if secure else 'http'}://{f'[{address}]' if ':' in address else address}:{port}/"


def _wait(thread: Thread, stop: Stop, duration: float | None, hook: Webhook | None) -> None:
    """Until somebody asks for the end, the time is over, or the server has ended."""
    until = float("inf") if duration is None else time.monotonic() + duration
    while thread.is_alive() and time.monotonic() < until and not stop.wait(min(1.0, until - time.monotonic())):
        for line in hook.exporter.lines() if hook is not None else ():
            note(line)


def _require_packages() -> None:
    try:
        import starlette
        import uvicorn
    except ImportError:
        raise NcclwatchError("the page needs starlette and uvicorn", "pip install 'ncclwatch[fleet]'") from None
    del starlette, uvicorn


def _remembered(history: str | None) -> Remembered | None:
    if history is None:
        return None
    from ncclwatch.history.query import need_packages
    from ncclwatch.serve.remembered import Remembered

    need_packages()
    return Remembered(history)


# --- who may see it --------------------------------------------------------------------------------------------------------


def _certificate(chain: Path | None, key: Path | None) -> Certificate | None:
    from ncclwatch.serve.server import Certificate

    if chain is None and key is None:
        return None
    if chain is None or key is None:
        raise UsageError("TLS needs a certificate and its key", "give both --tls-cert and --tls-key")
    found = Certificate(chain, key)
    found.check()
    return found


def _rules(
    address: str, token_file: Path | None, user_header: str | None, proxies: Sequence[str], hosts: Sequence[str], *, secure: bool
) -> Rules:
    """Who is let in; beyond this machine nobody is for nothing, and no token goes in the clear."""
    from ncclwatch.serve.access import Rules, parse_proxies, read_token

    if user_header is not None and not re.fullmatch(r"[A-Za-z0-9-]{1,64}", user_header):
        raise UsageError(f"'{clean(user_header, 60)}' is no name of a header", "write for example X-Forwarded-User")
    if user_header is not None and not proxies:
        raise UsageError("--user-header can be set by whoever asks", "say with --proxy from which address it is believed")
    if proxies and user_header is None:
        raise UsageError("--proxy belongs to --user-header", "add it, or leave --proxy out")
    token = read_token(token_file) if token_file is not None else ""
    if not ipaddress.ip_address(address).is_loopback:
        if not token and user_header is None:
            raise UsageError(
                f"{address} can be reached from other machines, and nobody is asked who they are",
                "give --token-file, or --user-header behind a proxy, or bind to 127.0.0.1",
            )
        if token and not secure:
            raise UsageError(
                "a token would go over the network in the clear",
                "give --tls-cert and --tls-key, or bind to 127.0.0.1 behind a proxy that speaks TLS",
            )
    return Rules(token, user_header or "", parse_proxies(proxies), tuple(hosts), secure)


# --- what is shown ---------------------------------------------------------------------------------------------------------


def _watched(engines: Sequence[str], jobs: Sequence[str], file: Path | None, keys: Path | None, *, alone: bool) -> list[Watched]:
    """Every job of every engine that was named, and those of the file; the engine on this machine where nothing is named."""
    found = _jobs_of(file, keys) if file is not None else []
    if not engines and (jobs or (alone and not found)):
        engines = ["127.0.0.1"]
    for each in engines:
        for text in jobs or [""]:
            name, separator, token = text.rpartition("=")
            found.append(Watched(each, token if separator else text, name, keys))
    return found


def _jobs_of(file: Path, keys: Path | None) -> list[Watched]:
    try:
        with file.open("rb") as stream:
            data = tomllib.loads(stream.read(MAX_JOBS_FILE).decode())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", "give a file of jobs with --jobs") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is no TOML: {error}", 'write [[job]], and below it engine = "tcp://HOST:PORT"') from error
    rows = data.get("job")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{file} names no job", 'write [[job]], and below it engine = "tcp://HOST:PORT"')
    return [_job_of_row(file, row, keys) for row in rows]


def _job_of_row(file: Path, row: dict[str, Any], keys: Path | None) -> Watched:
    unknown = sorted(row.keys() - _FIELDS)
    if unknown or not all(isinstance(value, str) for value in row.values()):
        what = f"no field {clean(unknown[0], 40)}" if unknown else "only text"
        raise UsageError(f"{file}: a job has {what}", f"its fields are {', '.join(sorted(_FIELDS))}")
    folder = Path(row["keys"]) if "keys" in row else keys
    return Watched(row.get("engine", "127.0.0.1"), row.get("token", ""), row.get("name", ""), folder)


def _live(watched: Sequence[Watched]) -> list[Feed]:
    from ncclwatch.messaging.keys import job_of
    from ncclwatch.remote.connect import connecting, engine_address
    from ncclwatch.serve.feed import LiveFeed

    names = [one.name or job_of(one.token) for one in watched]
    found: dict[str, Feed] = {}
    for one, own in zip(watched, names, strict=True):
        address = engine_address(one.engine)
        # A link is to hold after a restart: names are made of what was asked for, not counted.
        name = own if names.count(own) == 1 else f"{own}@{address.removeprefix('tcp://')}"
        if not _NAME.fullmatch(name):
            raise UsageError(f"'{clean(name, 80)}' cannot name a job", "use up to 80 letters, digits and . _ - @ :")
        if name in found:
            raise UsageError(f"two jobs are called {name}", "give one of them another name")
        # Keys that are missing or wrong are told at once, not when somebody looks.
        found[name] = LiveFeed(name, f"engine {address}", connecting(address, one.keys, one.token))
    return list(found.values())


def _fleet(address: str, keys: Path | None, stop: Stop) -> Callable[[Board], None]:
    """What adds every job that a fleet judges to the page, as it is found."""
    from ncclwatch.cli.fleet import bus_connection
    from ncclwatch.fleet.judged import follow
    from ncclwatch.remote.connect import following
    from ncclwatch.serve.feed import LiveFeed

    connect = bus_connection(address, keys)

    def found(board: Board, job: str) -> None:
        board.add(LiveFeed(job, f"fleet {address}", following(address, keys, job)))

    return lambda board: follow(connect, lambda job: found(board, job), stop)


def _recorded(paths: Sequence[Path]) -> list[Feed]:
    from ncclwatch.cli.options import require_files
    from ncclwatch.ingest.folders import files_in
    from ncclwatch.serve.feed import RecordedFeed
    from ncclwatch.store.container import is_recording

    found: dict[str, Feed] = {}
    for path in paths:
        if not path.is_dir():
            require_files([path])
        files = [file for file in files_in(path) if is_recording(file)] if path.is_dir() else [path]
        if not files or not all(is_recording(file) for file in files):
            raise UsageError(f"{clean(str(path), 160)} holds no recording", "make one with 'ncclwatch record -o FILE'")
        base = (
            re.sub(r"[^A-Za-z0-9._-]", "-", path.stem if path.is_file() else path.resolve().name)[:60].lstrip(".-_")
            or "recording"
        )
        name = base if base not in found else f"{base}-{len(found) + 1}"
        found[name] = RecordedFeed(name, clean(str(path), 160), files)
    return list(found.values())
