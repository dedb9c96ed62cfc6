"""``ncclwatch completion``: a script for the shell, made from the commands; at the Tab key nothing of ours is started."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from ncclwatch.cli.output import emit


class Shell(StrEnum):
    """Shells a script can be made for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(context: typer.Context, shell: Annotated[Shell, typer.Argument(help="The shell to write a script for.")]) -> None:
    """Print a completion script.

    bash: ncclwatch completion bash >/etc/bash_completion.d/ncclwatch; zsh: ncclwatch completion zsh
    >"${fpath[1]}/_ncclwatch"; fish: ncclwatch completion fish >~/.config/fish/completions/ncclwatch.fish
    """
    for line in script(shell, commands(getattr(context.find_root().command, "commands", {}))):
        emit(line)


def commands(group: Mapping[str, Any]) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Every command of a group (click's commands by name): a line about it, and its options with a line each.

    A group within has the options of all its commands.
    """
    found = {}
    for name, command in sorted(group.items()):
        within = getattr(command, "commands", {}).values()
        options = {
            option: (getattr(parameter, "help", "") or "").partition(".")[0].replace("\n", " ")
            for parameter in (*command.params, *(one for each in within for one in each.params))
            for option in (*parameter.opts, *parameter.secondary_opts)
            if option.startswith("--")
        }
        found[name] = (command.get_short_help_str(80), [*sorted(options.items()), ("--help", "Show the help of this command")])
    return found


def script(shell: Shell, known: dict[str, tuple[str, list[tuple[str, str]]]]) -> list[str]:
    """The script's lines."""
    if shell is Shell.FISH:
        lines = ["complete -c ncclwatch -n __fish_use_subcommand -f -l version -d 'Print the version'"]
        for name, (about, options) in known.items():
            lines.append(f"complete -c ncclwatch -n __fish_use_subcommand -f -a {name} -d {_quoted(about)}")
            for option, what in options:
                seen = f"'__fish_seen_subcommand_from {name}'"
                lines.append(f"complete -c ncclwatch -n {seen} -l {option.removeprefix('--')} -d {_quoted(what)}")
        return lines
    lines = ["#compdef ncclwatch", "autoload -U +X bashcompinit && bashcompinit"] if shell is Shell.ZSH else []
    lines += ["_ncclwatch() {", '  local word="${COMP_WORDS[COMP_CWORD]}" options=""', '  case "${COMP_WORDS[1]}" in']
    for name, (_, options) in known.items():
        lines.append(f'    {name}) options="{" ".join(option for option, _ in options)}" ;;')
    lines += [
        "  esac",
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f'    COMPREPLY=($(compgen -W "{" ".join(known)} --help --version" -- "$word"))',
        '  elif [ "${word:0:1}" = - ]; then',
        '    COMPREPLY=($(compgen -W "$options" -- "$word"))',
        "  else",
        '    COMPREPLY=($(compgen -f -- "$word"))',
        "  fi",
        "}",
        "complete -o filenames -F _ncclwatch ncclwatch",
    ]
    return lines


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
