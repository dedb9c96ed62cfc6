"""Errors that reach a user, each with the exit status it ends the program with.

Every message is one line: what is wrong, then what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum


class ExitStatus(IntEnum):
    """Documented exit statuses of every command."""

    OK = 0
    USAGE = 2
    TARGET = 3
    PRIVILEGE = 4
    VERDICT = 10


class NcclwatchError(Exception):
    """Base of the errors that end a command with one clear line.

    ``message`` says what is wrong and ``hint`` what to do; ``str()`` joins them.
    """

    status: ExitStatus = ExitStatus.TARGET

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message}: {hint}" if hint else message)

    def __reduce__(self) -> tuple[Callable[..., NcclwatchError], tuple[type[NcclwatchError], str, str]]:
        """The same error when it comes from another process, whatever its class is made from."""
        return _again, (type(self), self.message, self.hint)


def _again(kind: type[NcclwatchError], message: str, hint: str) -> NcclwatchError:
    error = kind.__new__(kind)
    NcclwatchError.__init__(error, message, hint)
    return error


class UsageError(NcclwatchError):
    """The command line or an input file makes no sense."""

    status = ExitStatus.USAGE


class TargetError(NcclwatchError):
    """The target process or file cannot be used (no NCCL in it, unknown layout, damaged file)."""

    status = ExitStatus.TARGET


class TargetGoneError(TargetError):
    """The target exited, or was replaced by exec, while it was being read."""


class PrivilegeError(NcclwatchError):
    """The kernel refuses what the command needs; the hint names the capability or setting."""

    status = ExitStatus.PRIVILEGE
