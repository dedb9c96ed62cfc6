"""The TCP probe: connect, greet, and time round trips with a listener of our own."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ncclwatch.errors import NcclwatchError, PrivilegeError
from ncclwatch.pathprobe.channel import AuthenticationError, Channel, ChannelError, greet
from ncclwatch.pathprobe.outcome import Answer, Outcome

MAX_COUNT = 1000

_NO_ROUTE = {
    errno.EHOSTUNREACH: "no route to the host, or a router or neighbour says that it is unreachable",
    errno.ENETUNREACH: "no route to its network",
    errno.ENETDOWN: "the network is down",
    errno.EHOSTDOWN: "the host is down",
    errno.EADDRNOTAVAIL: "no address of ours can be used for it",
    errno.ENODEV: "there is no such network device",
}


class _ProbeError(Exception):
    """The probe ends with this outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__()


def probe_tcp(host: str, port: int, *, token: bytes = b"", count: int = 5, timeout_s: float = 3.0, device: str = "") -> Outcome:
    """Time ``count`` round trips with a listener at ``host``; ``device`` names the network device to leave by.

    Never raises for what the network does. Raises :class:`NcclwatchError` for a name that cannot be resolved and
    :class:`PrivilegeError` where choosing the device takes privileges.
    """
    try:
        with connected(host, port, token=token, timeout_s=timeout_s, device=device) as channel:
            trips: list[float] = []
            for number in range(min(max(count, 1), MAX_COUNT)):
                channel.deadline = time.monotonic() + timeout_s
                began = time.perf_counter()
                channel.send({"op": "ping", "n": number})
                if channel.receive().get("n") != number:
                    raise ChannelError("an answer does not belong to its question")
                trips.append(time.perf_counter() - began)
    except _ProbeError as ended:
        return ended.outcome
    except TimeoutError:
        detail = f"{len(trips)} of {count} answered, then nothing for {timeout_s:g} s"
        return Outcome("tcp", Answer.TIMEOUT, detail, device, len(trips) + 1, len(trips), tuple(trips))
    except (OSError, ChannelError) as error:
        return Outcome("tcp", Answer.BROKEN, str(error), device, len(trips) + 1, len(trips), tuple(trips))
    return Outcome("tcp", Answer.OK, f"{len(trips)} of {len(trips)} answered", device, len(trips), len(trips), tuple(trips))


@contextmanager
def connected(host: str, port: int, *, token: bytes, timeout_s: float, device: str = "") -> Iterator[Channel]:
    """A greeted channel; raises :class:`_ProbeError` with the outcome when it does not come to one."""
    connection = _connect(host, port, timeout_s, device)
    with connection:
        channel = Channel(connection, time.monotonic() + timeout_s)
        try:
            greet(channel, token)
        except AuthenticationError as error:
            raise _ProbeError(Outcome("tcp", Answer.UNAUTHORISED, str(error), device)) from None
        except TimeoutError:
            detail = f"the connection was taken, but nothing is said within {timeout_s:g} s"
            raise _ProbeError(Outcome("tcp", Answer.SILENT, detail, device)) from None
        except (OSError, ChannelError) as error:
            raise _ProbeError(Outcome("tcp", Answer.BROKEN, str(error), device)) from None
        yield channel


def _connect(host: str, port: int, timeout_s: float, device: str) -> socket.socket:
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NcclwatchError(f"cannot resolve '{host}': {error}", "give an address, or a name that this node knows") from None
    outcome = Outcome("tcp", Answer.NO_ROUTE, "it has no address", device)
    for family, kind, protocol, _, address in places[:8]:
        connection = socket.socket(family, kind, protocol)
        try:
            _leave_by(connection, device)
            connection.settimeout(timeout_s)
            connection.connect(address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except NcclwatchError:
            connection.close()
            raise
        except TimeoutError:
            outcome = Outcome("tcp", Answer.TIMEOUT, f"no answer to the connection within {timeout_s:g} s", device)
        except ConnectionRefusedError:
            outcome = Outcome("tcp", Answer.REFUSED, f"the host answers, but nobody listens on port {port}", device)
        except OSError as error:
            reason = _NO_ROUTE.get(error.errno or 0)
            if error.errno == errno.ETIMEDOUT:
                outcome = Outcome("tcp", Answer.TIMEOUT, "no answer to the connection", device)
            elif reason:
                outcome = Outcome("tcp", Answer.NO_ROUTE, reason, device)
            else:
                outcome = Outcome("tcp", Answer.UNAVAILABLE, str(error.strerror or error), device)
        connection.close()
        if outcome.answer is Answer.REFUSED:
            break
    raise _ProbeError(outcome)


def _leave_by(connection: socket.socket, device: str) -> None:
    if not device:
        return
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode() + b"\0")
    except PermissionError:
        raise PrivilegeError(f"not allowed to leave by {device}", "run as root, or with CAP_NET_RAW") from None


ProbeEndedError = _ProbeError
