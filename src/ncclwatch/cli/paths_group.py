"""``ncclwatch paths``: a group of commands; without the name of one it is the map."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from ncclwatch.cli.paths import paths
from ncclwatch.cli.paths_follow import follow
from ncclwatch.cli.paths_move import move
from ncclwatch.cli.paths_plan import plan
from ncclwatch.cli.paths_probe import answer, probe
from ncclwatch.cli.paths_topology import topology
from ncclwatch.cli.paths_what_if import what_if

MAP = "map"


class _MapByDefault(TyperGroup):
    """``paths --all`` is ``paths map --all``: the map came first, and is what is asked for most."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = next(iter(args), "")
        if first not in self.commands and first not in ("-h", "--help"):
            args = [MAP, *args]
        return list(super().parse_args(ctx, args))


app = typer.Typer(
    cls=_MapByDefault,
    help="Which flow takes which path; which source port takes which; a plan of ports, and what it would gain. "
    "Without the name of a command: the map of the flows of --all, --pid PID, or recordings.",
    rich_markup_mode=None,
)
app.command(MAP)(paths)
app.command("probe")(probe)
app.command("answer")(answer)
app.command("plan")(plan)
app.command("follow")(follow)
app.command("move")(move)
app.command("topology")(topology)
app.command("what-if")(what_if)
