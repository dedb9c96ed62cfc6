"""What can go wrong with the guest."""

from __future__ import annotations


class GuestError(RuntimeError):
    """The guest did not do what it was asked: it did not boot, ran out of time, or ended without a status."""


class GuestUnavailableError(GuestError):
    """This machine lacks something the guest needs; ``package`` is the Debian package that brings it."""

    def __init__(self, what: str, package: str) -> None:
        super().__init__(f"{what}: install {package} (all packages: tests/vm/packages.txt)")
        self.package = package
