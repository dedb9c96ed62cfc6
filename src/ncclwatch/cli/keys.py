"""``ncclwatch keys``: make and show the keys with which engine, agents and viewers know each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ncclwatch.cli.output import emit
from ncclwatch.errors import UsageError

app = typer.Typer(help="Keys with which engine, agents and viewers know each other.", no_args_is_help=True, rich_markup_mode=None)

FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of keys.")]


@app.command("make")
def make(
    folder: FolderArgument = Path("keys"),
    name: Annotated[str | None, typer.Option("--name", help="Make one more key, of this name.")] = None,
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="With --name: agent or viewer.")] = "agent",
) -> None:
    """Make the keys of an engine, its agents and its viewers, or with --name one key more."""
    from ncclwatch.messaging.keys import make_key, write_key

    if role not in ("agent", "viewer"):
        raise UsageError(f"there is no role '{role}'", "choose agent or viewer")
    wanted = [(name, role)] if name else [("engine", "engine"), ("agent", "agent"), ("viewer", "viewer")]
    for word, part in wanted:
        key = make_key(word, part)
        for file in write_key(folder, key):
            emit(f"{file}  {key.role} {key.fingerprint}" + ("  secret" if file.suffix == ".key" else ""))
    if not name:
        emit(f"engine: keep {folder}/engine.key and {folder}/known; agents and viewers: their own .key and engine.pub")


@app.command("nats")
def nats(
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="Account: tenants see nothing of each other.")],
    folder: FolderArgument = Path("tenants"),
    name: Annotated[str | None, typer.Option("--name", help="Make one more key, of this name.")] = None,
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="With --name: engine, agent or viewer.")] = "agent",
    job: Annotated[str | None, typer.Option("--job", metavar="TOKEN", help="The key speaks for this job alone.")] = None,
    node: Annotated[str | None, typer.Option("--node", metavar="HOST", help="The key speaks for this node alone.")] = None,
) -> None:
    """Make the NKEYs of a tenant on a NATS server (engine, agent, viewer, or with --name one more), and the server's accounts."""
    from ncclwatch.messaging.bus_keys import add_user, write_tenants
    from ncclwatch.messaging.keys import ROLES, job_of

    if role not in ROLES:
        raise UsageError(f"there is no role '{role}'", "choose engine, agent or viewer")
    bound_job, bound_node = "*" if job is None else job_of(job), "*" if node is None else node
    for word, part in [(name, role)] if name else [(role, role) for role in ROLES]:
        for file in add_user(folder, tenant, word, part, job=bound_job, node=bound_node):
            emit(f"{file}  {part}" + ("  secret" if file.suffix == ".nk" else ""))
    file, tenants = write_tenants(folder)
    emit(f"{file}  {tenants} tenant{'s' if tenants != 1 else ''}: the server reads it again at 'nats-server --signal reload'")
    emit(f"agents, engines and viewers of {tenant}: their own .nk as ROLE.nk, and ca.pem, in the folder that --keys names")


@app.command("show")
def show(folder: FolderArgument = Path("keys")) -> None:
    """Show the keys in a folder by fingerprint; secrets are never shown."""
    from ncclwatch.messaging.keys import KNOWN, KeyFileError, read_key

    files = [*sorted(folder.glob("*.key")), *sorted(folder.glob("*.pub")), *sorted((folder / KNOWN).glob("*.pub"))]
    if not files:
        raise UsageError(f"{folder} holds no keys", "make them with 'ncclwatch keys make'")
    for file in files:
        try:
            key = read_key(file)
        except KeyFileError as error:
            emit(f"{file}: {error}")
            continue
        emit(f"{file}  {key.role} {key.fingerprint}" + ("  secret" if key.secret else ""))


@app.command("token")
def token() -> None:
    """Make a job token: agents and viewers of one job give it with --job, and see nothing of any other job."""
    from ncclwatch.messaging.keys import make_token

    emit(make_token())
