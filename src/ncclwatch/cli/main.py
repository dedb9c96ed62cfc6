"""The ``ncclwatch`` command: its subcommands and the one place where errors become exit statuses.

Exit statuses: 0 fine, 2 usage, 3 target unusable, 4 missing privilege, 10 a verdict stands (``--exit-code``), 130 interrupted,
141 output closed by its reader, 1 a bug in ncclwatch. Every error is one line on standard error.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import typer

from ncclwatch.cli import (
    agent,
    asking,
    attach,
    completion,
    diagnose,
    doctor,
    dump,
    engine,
    flows,
    keys,
    probe,
    ps,
    record,
    replay,
    report,
    shim,
    snapshot,
    top,
    topology,
    version,
)
from ncclwatch.cli.output import OutputClosed
from ncclwatch.errors import ExitStatus, NcclwatchError
from ncclwatch.text import clean

INTERRUPTED = 130
OUTPUT_CLOSED = 141
BUG = 1

app = typer.Typer(
    name="ncclwatch",
    help="Attach to a live, unmodified NCCL job and say which rank, which stage and which link holds it up.",
    epilog="Exit status: 0 fine, 2 usage, 3 target unusable, 4 missing privilege, 10 a verdict stands (with --exit-code).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: it starts three times faster than the coloured one and reads the same in a log.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("ps", short_help="The NCCL processes of this node.")(ps.ps)
app.command("dump", short_help="What NCCL believes: communicators, unfinished steps.")(dump.dump)
app.command("snapshot", short_help="Record what a diagnosis needs into a file.")(snapshot.snapshot)
app.command("diagnose", short_help="Which rank holds the job up, from outside, now.")(diagnose.diagnose)
app.command("attach", short_help="Watch a job live.")(attach.attach)
app.command("ask", short_help="A verdict now from a running attach or engine.")(asking.ask)
app.command("record", short_help="Keep what is seen of a job in a file.")(record.record)
app.command("replay", short_help="A recording in the dashboard.")(replay.replay)
app.command("report", short_help="A page for a ticket, or a trace for Perfetto.")(report.report)
app.command("topology", short_help="Groups, roles and layout, from the calls alone.")(topology.topology)
app.command("flows", short_help="Connections over the network: rates, latency, retries.")(flows.flows)
app.command("probe", short_help="Is a path dead, or the application silent?")(probe.probe)
app.command("agent", short_help="Send what this node shows to an engine.")(agent.agent)
app.command("engine", short_help="Diagnose jobs from what agents send.")(engine.engine)
app.command("top", short_help="Watch a whole job from its engine.")(top.top)
app.add_typer(keys.app, name="keys", short_help="Keys of engine, agents and viewers.")
app.command("shim", short_help="The counter shim that a job may load.")(shim.shim)
app.command("doctor", short_help="What works here, and what to do about each gap.")(doctor.doctor)
app.command("completion", short_help="A completion script for the shell.")(completion.completion)
app.command("version", short_help="Print the version.")(version.version)


@app.callback(invoke_without_command=True)
def _root(
    show_version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if show_version:
        version.version()
        raise typer.Exit


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; every error has become one line on standard error."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal whose encoding lacks a character shows "?" instead of ending the command.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(args=arguments, prog_name="ncclwatch", standalone_mode=False)
        sys.stdout.flush()
    except NcclwatchError as error:
        return _fail(str(error), error.status)
    except (OutputClosed, BrokenPipeError):
        return _output_closed()
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _usage(error, arguments)
        return _bug(error)
    return int(status) if isinstance(status, int) else ExitStatus.OK


def main() -> None:
    """Entry point of the ``ncclwatch`` script."""
    sys.exit(run())


def _command_path(arguments: Sequence[str]) -> str:
    """``ncclwatch dump`` when the command could be told, else ``ncclwatch``."""
    names = {command.name for command in app.registered_commands}
    return next((f"ncclwatch {word}" for word in arguments[:1] if word in names), "ncclwatch")


def _usage(error: Exception, arguments: Sequence[str]) -> int:
    """typer's own usage errors, told in our way."""
    message = str(error.format_message()).strip() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    if "\n" in message:
        # No arguments at all: the message is the help text.
        print(message, file=sys.stderr)
        return ExitStatus.USAGE
    path = context.command_path if context is not None else _command_path(arguments)
    return _fail(f"{message.rstrip('.')}: see '{path} --help'", ExitStatus.USAGE)


def _bug(error: Exception) -> int:
    if os.environ.get("NCCLWATCH_DEBUG") == "1":
        traceback.print_exception(error)
        return BUG
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return _fail(
        f"internal error: {type(error).__name__}: {error}{where}: "
        "run again with NCCLWATCH_DEBUG=1 and report the traceback with the output of 'ncclwatch doctor --json'",
        BUG,
    )


def _output_closed() -> int:
    # What is still buffered would be flushed, and fail, once more at exit.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OUTPUT_CLOSED


def _fail(message: str, status: int) -> int:
    with contextlib.suppress(OSError):
        print(f"ncclwatch: error: {clean(message, 2000)}", file=sys.stderr)
    return status
