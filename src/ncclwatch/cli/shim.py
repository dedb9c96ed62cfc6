"""``ncclwatch shim``: the counter shim that a job may load: how to switch it on, and what it says of a process."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclwatch.cli import options
from ncclwatch.cli.options import JsonOption, PidOption
from ncclwatch.cli.output import emit, emit_json, note
from ncclwatch.errors import TargetError, UsageError
from ncclwatch.text import clean

if TYPE_CHECKING:
    from ncclwatch.model.device import DeviceSample

Version = tuple[int, int, int]


def shim(
    print_env: Annotated[
        bool, typer.Option("--print-env", help="The environment variables that load it, as shell lines.")
    ] = False,
    pid: PidOption = None,
    libnccl: Annotated[Path | None, typer.Option("--libnccl", metavar="FILE", help="The libnccl.so.2 of the job.")] = None,
    build: Annotated[bool, typer.Option("--build", help="Build the library first (needs make and a C compiler).")] = False,
    frame: Annotated[
        Path | None, typer.Option("--frame", metavar="FILE", help="Show a frame that a process left behind.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Load the counter shim into a job (--print-env), or show what it publishes (--pid, --frame)."""
    pids = options.pids(pid)
    if sum((bool(pids) and not print_env, frame is not None, print_env)) > 1:
        raise UsageError("--frame, --pid and --print-env ask for different things", "give one of them")
    if print_env:
        _print_env(pids, libnccl, build, as_json)
    elif frame is not None:
        _show_frame(frame, as_json)
    elif pids:
        _show(pids, as_json)
    elif build:
        from ncclwatch.collect import shim as shim_file

        emit(str(shim_file.build()))
    else:
        raise UsageError("nothing was asked for", "use --print-env, --pid PID, --frame FILE or --build")


def _print_env(pids: list[int], libnccl: Path | None, build: bool, as_json: bool) -> None:
    from ncclwatch.collect import shim as shim_file

    library = shim_file.build() if build else shim_file.built_library()
    if library is None:
        raise TargetError("the counter shim is not built yet", "add --build (needs make and a C compiler, no CUDA)")
    version = _version(pids, libnccl)
    wanted = shim_file.settings(library, version)
    if as_json:
        emit_json({"nccl": version, "library": str(library), "environment": {setting.name: setting.value for setting in wanted}})
        return
    about = f"NCCL {'.'.join(map(str, version))}" if version else "an NCCL of any version (say which with --libnccl or --pid)"
    emit(f"# for {about}; set in the environment of every rank, before it starts")
    for setting in wanted:
        value = shlex.quote(setting.value)
        if setting.name == "LD_PRELOAD":
            value += "${LD_PRELOAD:+:$LD_PRELOAD}"
        emit(f"export {setting.name}={value}  # {setting.purpose}")


def _version(pids: list[int], libnccl: Path | None) -> Version | None:
    if libnccl is not None:
        from ncclwatch.target.elf import ElfError, ElfFile
        from ncclwatch.target.version import find_version

        try:
            with ElfFile.open(libnccl) as elf:
                found = find_version(elf)
        except ElfError as error:
            raise TargetError(f"{clean(str(libnccl))}: {error}", "name the libnccl.so.2 that the job loads") from None
        if found is None:
            raise TargetError(f"{clean(str(libnccl))} carries no NCCL", "name the libnccl.so.2 that the job loads")
        return found.number
    if not pids:
        return None
    from ncclwatch.target.discover import inspect_process

    versions = {inspect_process(pid).version for pid in pids}
    if len(versions) > 1:
        raise UsageError("these processes run different versions of NCCL", "ask for one at a time")
    return versions.pop()


def _show(pids: list[int], as_json: bool) -> None:
    from ncclwatch.collect.device import decode
    from ncclwatch.target.frame import FrameFile

    shown: list[tuple[int, DeviceSample]] = []
    for pid in pids:
        frame = FrameFile.find(pid)
        if frame is None:
            note(f"pid {pid} has not loaded the counter shim: 'ncclwatch shim --print-env --pid {pid}' says how")
            continue
        with frame:
            shown.append((pid, decode(frame.read())))
    if not shown:
        raise TargetError(
            "no process given has the counter shim", "restart the job with what 'ncclwatch shim --print-env' prints"
        )
    if as_json:
        emit_json({"schema": "ncclwatch.shim/1", "processes": [{"pid": pid, "device": device} for pid, device in shown]})
        return
    for pid, device in shown:
        _text(f"pid {pid}", device)


def _show_frame(path: Path, as_json: bool) -> None:
    from ncclwatch.collect.device import decode
    from ncclwatch.target.frame import FrameFile

    with FrameFile.open_path(path) as frame:
        device = decode(frame.read())
    if as_json:
        emit_json({"schema": "ncclwatch.shim/1", "frame": str(path), "device": device})
    else:
        _text(clean(str(path)), device)


def _text(title: str, device: DeviceSample) -> None:
    entry = f"{device.entry}, interface v{device.interface}" if device.interface else device.entry
    emit(f"{title}: {entry}; sampler {device.sampler}; {device.events:,} events" + _losses(device))
    for own in device.communicators:
        name = f"{own.hash:016x}" if own.hash else f"at {own.inside_address:#x}"
        rank = f" rank {own.rank} of {own.nranks or '?'}" if own.rank is not None else ""
        ended = ", ended" if own.finished else ""
        emit(f"  communicator {name}{rank}{ended}: {own.collectives:,} collectives, {own.transfers:,} transfers")
        for operation in own.recent[-4:]:
            number = operation.sequence if operation.sequence is not None else operation.ordinal
            took = f", {operation.duration_ns / 1e6:.3f} ms" if operation.duration_ns else ""
            channels = (
                f", {operation.finished} of {operation.channels or operation.started} channels done" if operation.observed else ""
            )
            emit(f"    {operation.function or 'operation'} #{number}: GPU {operation.state}{channels}{took}")
    for transfer in device.transfers:
        way = "to" if transfer.is_send else "from"
        first = transfer.waits[0] if transfer.waits else None
        waits = f"; step {first.step}: {first.state}" if first else ""
        done = f"{transfer.steps_finished} of {transfer.nsteps} steps done"
        emit(f"  unfinished: channel {transfer.channel} {way} rank {transfer.peer}, {done}{waits}")


def _losses(device: DeviceSample) -> str:
    counted = {"unmatched": device.unmatched, "did not fit": device.refused, "left out": device.contended, "torn": device.torn}
    return "".join(f", {number:,} {what}" for what, number in counted.items() if number)
