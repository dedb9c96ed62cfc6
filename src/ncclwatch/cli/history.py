"""``ncclwatch history``: what happened to jobs, in the past; a group of commands, and SQL."""

from __future__ import annotations

from typing import Annotated

import typer

from ncclwatch.cli.history_answers import gaps, jobs, node, verdicts
from ncclwatch.cli.history_options import MEMORY, TIMEOUT_S, MemoryOption, TimeoutOption, json_of, opened
from ncclwatch.cli.history_runs import compare, downtime, trend
from ncclwatch.cli.history_upkeep import compact, import_files, keep
from ncclwatch.cli.options import JsonOption
from ncclwatch.cli.output import emit, emit_json, note
from ncclwatch.errors import UsageError
from ncclwatch.text import clean, columns

app = typer.Typer(
    help="What happened to jobs, in the past: runs, verdicts, whether a node has been blamed before, downtime, trends. "
    "'attach' and 'engine' keep it with --history FOLDER.",
    rich_markup_mode=None,
    invoke_without_command=True,
)
app.command("jobs")(jobs)
app.command("verdicts")(verdicts)
app.command("node")(node)
app.command("downtime")(downtime)
app.command("trend")(trend)
app.command("compare")(compare)
app.command("gaps")(gaps)
app.command("import")(import_files)
app.command("compact")(compact)
app.command("keep")(keep)


@app.callback()
def history(
    context: typer.Context,
    sql: Annotated[str | None, typer.Option("--sql", metavar="SELECT", help="A question in SQL; it can only read.")] = None,
    folder: Annotated[
        str, typer.Option("--history", metavar="FOLDER", envvar="NCCLWATCH_HISTORY", help="The history, for --sql.")
    ] = "",
    as_json: JsonOption = False,
    memory: MemoryOption = MEMORY,
    timeout: TimeoutOption = TIMEOUT_S,
) -> None:
    """What happened to jobs, in the past: runs, verdicts, whether a node has been blamed before, downtime, trends.

    \b
    Examples (NCCLWATCH_HISTORY names the folder, or --history):
      ncclwatch history node node7                        has it been blamed before? for what?
      ncclwatch history downtime --since 7d               by phase, of all jobs
      ncclwatch history trend train.py                    how long an iteration took
      ncclwatch history --sql "SELECT class, count(*) FROM incidents GROUP BY class"
    """
    if context.invoked_subcommand is not None:
        if sql is not None:
            raise UsageError("--sql stands alone", "leave the name of the command out")
        return
    if sql is None:
        raise UsageError("nothing is asked", "name a command, or give --sql; 'ncclwatch history --help' lists them")
    if not folder:
        raise UsageError("no history is named", "give --history FOLDER, or set NCCLWATCH_HISTORY")
    with opened(folder, None, (), memory, timeout) as asked:
        answer = asked.ask(sql)
    if answer.cut:
        note(f"only the first {len(answer.rows)} rows are shown")
    if as_json:
        emit_json(json_of(answer.dicts()))
        return
    rows = [["" if value is None else clean(str(json_of(value)), 2000) for value in row] for row in answer.rows]
    for line in columns(answer.names, rows) if rows else ["no rows"]:
        emit(line)
