"""``ncclwatch probe``: is the path dead, or the application silent? From processes of our own, never by way of the job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclwatch.cli.options import JsonOption
from ncclwatch.cli.output import emit, emit_json, flush, plain
from ncclwatch.errors import ExitStatus, UsageError
from ncclwatch.pathprobe.token import TOKEN_VARIABLE, read_token
from ncclwatch.stopping import stop_on_signals
from ncclwatch.text import Style, clean

if TYPE_CHECKING:
    from ncclwatch.pathprobe.outcome import Outcome

SCHEMA_NAME = "ncclwatch.probe/1"
DEFAULT_PORT = 28050


def probe(
    where: Annotated[
        str | None, typer.Argument(metavar="[HOST[:PORT]]", help="Whom to call; with --listen, the address to listen on.")
    ] = None,
    listen: Annotated[bool, typer.Option("--listen", help="Answer probes of other nodes, until interrupted.")] = False,
    device: Annotated[
        str, typer.Option("--device", help="Leave by this NIC: an RDMA device (mlx5_0) or a network device (eth0).")
    ] = "",
    device_port: Annotated[int, typer.Option("--port", min=1, max=255, help="Port of the RDMA device.")] = 1,
    gid_index: Annotated[int | None, typer.Option("--gid-index", min=0, max=4096, help="GID to use; RoCE v2 by default.")] = None,
    count: Annotated[int, typer.Option("--count", "-c", min=1, max=1000, help="Round trips to time.")] = 5,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, max=60.0, help="Seconds to wait for each answer.")] = 3.0,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help=f"File with the secret both ends share (or ${TOKEN_VARIABLE}).")
    ] = None,
    duration: Annotated[float | None, typer.Option("--duration", "-d", min=0.1, max=1e7, help="Seconds to listen.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Tell a dead path from a silent application: TCP round trips, or zero-payload RDMA writes with --device of an RDMA NIC."""
    token = read_token(token_file)
    if listen:
        return _listen(where, token, device, device_port, gid_index, duration, as_json)
    if not where:
        raise UsageError("nobody to call", "give HOST[:PORT] of a node that runs 'ncclwatch probe --listen', or --listen")
    host, port = host_and_port(where)
    from ncclwatch.pathprobe.rdma import probe_rdma
    from ncclwatch.pathprobe.tcp import probe_tcp

    if device and Path("/sys/class/infiniband", device).exists():
        outcome = probe_rdma(
            host, port, device, port=device_port, gid_index=gid_index, token=token, count=count, timeout_s=timeout
        )
    elif device and not Path("/sys/class/net", device).exists():
        raise UsageError(f"this node has no NIC '{clean(device, 40)}'", "see 'ip link' and 'rdma link'")
    else:
        outcome = probe_tcp(host, port, token=token, count=count, timeout_s=timeout, device=device)
    if as_json:
        emit_json(outcome_json(outcome, host, port))
    else:
        style = Style()
        verdict, advice = in_words(outcome, host)
        paint = style.good if outcome.answer == "ok" else style.bad if outcome.answer.path_is_alive is False else style.warn
        emit(f"{paint(str(outcome.answer).upper())}  {verdict}")
        emit(f"  {clean(outcome.detail, 300)}{trips(outcome)}")
        if advice:
            emit(f"  do: {advice}")
    return status_of(outcome)


def status_of(outcome: Outcome) -> ExitStatus:
    """0 for an answer, 10 for a path that is dead, 3 for everything between."""
    if outcome.answer == "ok":
        return ExitStatus.OK
    return ExitStatus.VERDICT if outcome.answer.path_is_alive is False else ExitStatus.TARGET


def outcome_json(outcome: Outcome, host: str, port: int) -> dict[str, Any]:
    """The outcome as JSON."""
    verdict, advice = in_words(outcome, host)
    return {
        "schema": SCHEMA_NAME,
        "host": host,
        "port": port,
        **plain(outcome),
        "median_s": outcome.median,
        "path_is_alive": outcome.answer.path_is_alive,
        "verdict": verdict,
        "next_step": advice,
    }


def in_words(outcome: Outcome, host: str) -> tuple[str, str]:
    """(what the outcome means, what to do)."""
    to = f"the path to {clean(host, 100)}" + (f" over {clean(outcome.device, 40)}" if outcome.device else "")
    rdma = outcome.kind == "rdma"
    meanings = {
        "ok": (f"{to} is alive, and so is {'the adapter' if rdma else 'the process'} at its end", ""),
        "silent": (
            f"{to} is alive; the process that listens there is silent",
            "look at that process: its host's kernel answers for it",
        ),
        "refused": (f"{to} is alive; nobody listens", "run 'ncclwatch probe --listen' there for round trips"),
        "unauthorised": (f"{to} is alive; the listener has another token", "give both ends the same token"),
        "no-route": (f"{to} is dead on this side: there is no way", "look at the link, the address and the routes of this node"),
        "timeout": (
            f"{to} is dead: nobody answers",
            "look at cables, switch ports, the other host and firewalls; a probe over another NIC tells host from path",
        ),
        "broken": (f"{to} is alive, but the conversation broke off", ""),
        "unavailable": (f"{to} could not be probed", ""),
    }
    return meanings[str(outcome.answer)]


def trips(outcome: Outcome) -> str:
    """``; round trip 0.11 / 0.13 / 0.40 ms (least, median, most)``."""
    if not outcome.round_trips or outcome.median is None:
        return ""
    low, high = min(outcome.round_trips), max(outcome.round_trips)
    return f"; round trip {low * 1e3:.3f} / {outcome.median * 1e3:.3f} / {high * 1e3:.3f} ms (least, median, most)"


def host_and_port(where: str) -> tuple[str, int]:
    """``node1``, ``node1:28050``, ``[fe80::1]:28050``, ``fe80::1``."""
    text = where.strip()
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    else:
        host, port = text, ""
    if not host or (port and not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536)):
        raise UsageError(f"'{clean(where, 80)}' is not HOST[:PORT]", "write node1, node1:28050 or [fe80::1]:28050")
    return host, int(port) if port else DEFAULT_PORT


def _listen(
    where: str | None, token: bytes, device: str, device_port: int, gid_index: int | None, duration: float | None, as_json: bool
) -> int:
    from ncclwatch.pathprobe.listener import Listener

    address, port = host_and_port(where) if where else ("127.0.0.1", DEFAULT_PORT)
    stop = stop_on_signals()

    def said(text: str) -> None:
        if as_json:
            emit_json({"type": "call", "text": clean(text, 300)}, indent=None)
        else:
            emit(clean(text, 300))
        flush()

    with Listener(address, port, token, device=device, device_port=device_port, gid_index=gid_index, said=said) as listener:
        if as_json:
            emit_json({"type": "listening", "schema": SCHEMA_NAME, "address": address, "port": listener.port}, indent=None)
        else:
            emit(f"listening on {address} port {listener.port}; Ctrl-C ends")
        flush()
        stop.wait(duration)
    return ExitStatus.OK
