"""The ``ncclwatch`` command: its subcommands and the one place where errors become exit statuses.

Exit statuses: 0 fine, 2 usage, 3 target unusable, 4 missing privilege, 10 a verdict stands (``--exit-code``), 130 interrupted,
141 output closed by its reader, 1 a bug in ncclwatch. Every error is one line on standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from ncclwatch.cli.haste import at_start

# On a crowded node each import takes long: until the first word is said nothing is loaded that it does not need.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import typer

_COMMANDS: dict[str, str] = {
    "ps": "The NCCL processes of this node.",
    "dump": "What NCCL believes: communicators, unfinished steps.",
    "snapshot": "Record what a diagnosis needs into a file.",
    "diagnose": "Which rank holds the job up, from outside, now.",
    "explain": "What is known of a cause, and known defects of NCCL.",
    "watch-folder": "A verdict for each job whose watchdog dumps.",
    "attach": "Watch a job live.",
    "ask": "A verdict now from a running attach or engine.",
    "record": "Keep what is seen of a job in a file.",
    "replay": "A recording in the dashboard.",
    "report": "A page for a ticket, or a trace for Perfetto.",
    "gpus": "What is wrong with the GPUs of this node.",
    "stacks": "Where ranks stand, the odd ones out.",
    "compare": "How the processes of a job differ.",
    "topology": "Groups, roles and layout, from calls or from counts.",
    "flows": "Connections over the network: rates, latency, retries.",
    "tuning": "What NCCL chose, and the links it leaves empty.",
    "paths": "Which flow takes which path; probes, plans.",
    "probe": "Is a path dead, or the application silent?",
    "agent": "Send what this node shows to an engine.",
    "engine": "Diagnose jobs from what agents send.",
    "fleet": "Many jobs: workers that hear, judges.",
    "top": "Watch a whole job from its engine.",
    "serve": "A page for browsers: jobs, verdicts, timeline.",
    "keys": "Keys of engine, agents and viewers.",
    "history": "What happened before: node, downtime, trend, SQL.",
    "shim": "The counter shim that a job may load.",
    "doctor": "What works here, and what to do about each gap.",
    "completion": "A completion script for the shell.",
    "version": "Print the version.",
}
"""Every command by its name, with what it is for. Each is a function of the module of its name; some are groups of commands."""

_MODULES = {"ask": "asking", "paths": "paths_group", "watch-folder": "watch_folder"}
_GROUPS = ("fleet", "history", "keys", "paths")
_NEEDS_ALL = ("completion",)


def application(only: str = "") -> typer.Typer:
    """The command line: all of it, or the one command that was named, so that nobody waits until the others are loaded."""
    import typer

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
    for name, about in _COMMANDS.items():
        if only not in ("", name):
            continue
        module = import_module(f"ncclwatch.cli.{_MODULES.get(name, name)}")
        if name in _GROUPS:
            app.add_typer(module.app, name=name, short_help=about)
        else:
            app.command(name, short_help=about)(getattr(module, name.replace("-", "_")))

    @app.callback(invoke_without_command=True)
    def _root(
        show_version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    ) -> None:
        if show_version:
            import_module("ncclwatch.cli.version").version()
            raise typer.Exit

    return app


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; every error has become one line on standard error."""
    from ncclwatch.cli.ending import ended, prepare_streams

    prepare_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    only = next((word for word in words[:1] if word in _COMMANDS and word not in _NEEDS_ALL), "")
    return ended(
        lambda: application(only)(args=words, prog_name="ncclwatch", standalone_mode=False),
        lambda error: _usage(error, words),
    )


def main() -> None:
    """Entry point of the ``ncclwatch`` script."""
    at_start(sys.argv[1:])
    sys.exit(run())


def _command_path(arguments: Sequence[str]) -> str:
    """``ncclwatch dump`` when the command could be told, else ``ncclwatch``."""
    return next((f"ncclwatch {word}" for word in arguments[:1] if word in _COMMANDS and word not in _GROUPS), "ncclwatch")


def _usage(error: Exception, arguments: Sequence[str]) -> int | None:
    """typer's own usage errors, told in our way; ``None`` for what is none."""
    from ncclwatch.cli.ending import INTERRUPTED, fail
    from ncclwatch.errors import ExitStatus

    if type(error).__name__ == "Abort":
        return INTERRUPTED
    if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
        return None
    message = str(error.format_message()).strip()
    context = getattr(error, "ctx", None)
    if "\n" in message:
        # No arguments at all: the message is the help text.
        print(message, file=sys.stderr)
        return ExitStatus.USAGE
    path = context.command_path if context is not None else _command_path(arguments)
    return fail(f"{message.rstrip('.')}: see '{path} --help'", ExitStatus.USAGE)
