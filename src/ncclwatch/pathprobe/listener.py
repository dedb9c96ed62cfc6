"""The listener: answers pings and connects queue pairs for callers that know the token. Bounded in everything a caller
chooses.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

from ncclwatch.errors import NcclwatchError, UsageError
from ncclwatch.pathprobe.channel import AuthenticationError, Channel, ChannelError, admit
from ncclwatch.pathprobe.rdma import serve_rdma

MAX_CALLERS = 8
GREETING_S = 5.0
"""How long a caller may take to show that it knows the token."""
CALL_S = 60.0
"""How long one call lasts at most."""
MAX_MESSAGES = 2000
MIN_TOKEN = 16


def is_loopback(address: str) -> bool:
    """Whether an address to listen on is reached from this host alone."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_token(address: str, token: bytes) -> None:
    """Refuse to listen beyond this host without a token, or with one that can be guessed."""
    if token and len(token) < MIN_TOKEN:
        raise UsageError(f"a token of {len(token)} bytes can be guessed", f"use at least {MIN_TOKEN}: openssl rand -hex 16")
    if not token and not is_loopback(address):
        raise UsageError(
            f"listening on {address} needs a token that callers must know",
            "give both ends the same --token-file, or NCCLWATCH_PROBE_TOKEN; make one with: openssl rand -hex 16",
        )


class Listener:
    """Listens on one address until closed. ``said`` is told, in words, who called and how that went.

    Raises :class:`UsageError` (no token) and :class:`NcclwatchError` (the address cannot be used).
    """

    def __init__(
        self,
        address: str,
        port: int,
        token: bytes = b"",
        *,
        device: str = "",
        device_port: int = 1,
        gid_index: int | None = None,
        said: Callable[[str], None] = lambda _: None,
    ) -> None:
        check_token(address, token)
        self._token, self._device, self._device_port, self._gid_index = token, device, device_port, gid_index
        self._said = said
        self._places = threading.BoundedSemaphore(MAX_CALLERS)
        self._closing = threading.Event()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._socket = socket.create_server((address, port), family=family, backlog=MAX_CALLERS)
        except (OSError, OverflowError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise NcclwatchError(f"cannot listen on {address} port {port}: {reason}", "choose another address or port") from None
        self._socket.settimeout(0.2)
        self._thread = threading.Thread(target=self._accept, name="ncclwatch-probe", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on (also when any was asked for)."""
        return int(self._socket.getsockname()[1])

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; calls under way end with their connection."""
        self._closing.set()
        self._thread.join(timeout=2)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, address = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                time.sleep(0.2)  # out of descriptors, say: others keep their calls
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._call, args=(connection, str(address[0])), daemon=True).start()

    def _call(self, connection: socket.socket, caller: str) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                local = str(connection.getsockname()[0])
                channel = Channel(connection, time.monotonic() + GREETING_S)
                admit(channel, self._token)
                channel.deadline = time.monotonic() + CALL_S
                self._serve(channel, caller, local)
        except AuthenticationError:
            self._said(f"{caller}: refused, it does not know the token")
        except (ChannelError, OSError) as error:
            self._said(f"{caller}: {error or type(error).__name__}")
        except Exception as error:
            # A caller must not be able to end the listener.
            self._said(f"{caller}: internal error {type(error).__name__}: {error}")
        finally:
            self._places.release()

    def _serve(self, channel: Channel, caller: str, local: str) -> None:
        pings = 0
        for _ in range(MAX_MESSAGES):
            try:
                message = channel.receive()
            except ConnectionResetError:
                break
            if message.get("op") == "ping":
                number = message.get("n")
                channel.send({"n": number if isinstance(number, int) and abs(number) < 1 << 31 else None})
                pings += 1
            elif message.get("op") == "rdma":
                serve_rdma(channel, message, self._device, self._device_port, self._gid_index, local)
                self._said(f"{caller}: RDMA")
            else:
                break
        if pings:
            self._said(f"{caller}: {pings} pings")
