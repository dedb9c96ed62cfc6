"""The RDMA probe: queue pairs of our own on both ends, addresses exchanged over the TCP channel, zero-payload writes timed."""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from ncclwatch.nic.rdma import SYS, RdmaPort, read_ports
from ncclwatch.pathprobe.channel import Channel, ChannelError
from ncclwatch.pathprobe.outcome import Answer, Outcome
from ncclwatch.pathprobe.tcp import ProbeEndedError, connected
from ncclwatch.pathprobe.verbs import Address, QueuePairProbe, VerbsError
from ncclwatch.paths.ports import LOWEST
from ncclwatch.text import clean
from ncclwatch.wire import abi

_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ETIMEDOUT, errno.EADDRNOTAVAIL, errno.EINVAL)
"""What moving a queue pair to "ready to receive" fails with when the kernel cannot resolve the other end's address."""

MOST_PAIRS = 96
"""Bound: queue pairs of one caller."""
_NOBODY = (abi.Status.RETRY_EXC_ERR, abi.Status.RESP_TIMEOUT_ERR)


def probe_rdma(
    host: str,
    tcp_port: int,
    device: str,
    *,
    port: int = 1,
    gid_index: int | None = None,
    token: bytes = b"",
    count: int = 5,
    timeout_s: float = 3.0,
    sys: Path = SYS,
) -> Outcome:
    """Time ``count`` zero-payload writes from a port of ``device`` to the listener at ``host``, with which queue pairs are agreed
    on over TCP.

    Never raises for what devices and networks do. Raises as :func:`ncclwatch.pathprobe.tcp.probe_tcp` for the TCP part.
    """
    name = f"{device}:{port}"
    try:
        with (
            QueuePairProbe(device, port, gid_index, sys) as queue_pair,
            connected(host, tcp_port, token=token, timeout_s=timeout_s) as channel,
        ):
            return _agree_and_write(queue_pair, channel, count, timeout_s, name)
    except ProbeEndedError as ended:
        detail = f"the ends could not agree over TCP: {ended.outcome.detail}"
        return Outcome("rdma", Answer.UNAVAILABLE, detail, name)
    except VerbsError as error:
        dead = error.code == errno.ENETDOWN
        return Outcome("rdma", Answer.NO_ROUTE if dead else Answer.UNAVAILABLE, str(error), name)
    except (OSError, ChannelError) as error:
        return Outcome("rdma", Answer.UNAVAILABLE, f"the ends could not agree over TCP: {error or 'no answer'}", name)


def _agree_and_write(queue_pair: QueuePairProbe, channel: Channel, count: int, timeout_s: float, name: str) -> Outcome:
    try:
        agree(queue_pair, channel)
    except VerbsError as error:
        if error.code in _NO_ROUTE:
            return Outcome("rdma", Answer.NO_ROUTE, f"no way to the other end's address: {error.message}", name)
        raise
    outcome = _write(queue_pair, count, timeout_s, name)
    channel.send({"op": "done"})
    return outcome


def agree(queue_pair: QueuePairProbe, channel: Channel, source_port: int = 0, back: int = 0) -> None:
    """Connect to a queue pair of the listener's: ours sends by this source port, its answers leave by ``back`` (0: as drivers
    choose). Raises :class:`VerbsError`, also for what the other end cannot do.
    """
    channel.send({"op": "rdma", "address": queue_pair.address.to_json(), "source_port": back})
    answer = channel.receive()
    if "address" not in answer:
        raise VerbsError(f"the other end cannot: {clean(str(answer.get('error', 'no reason given')), 300)}")
    queue_pair.connect(Address.from_json(answer["address"]), source_port)


def _write(queue_pair: QueuePairProbe, count: int, timeout_s: float, name: str) -> Outcome:
    trips: list[float] = []
    for _ in range(count):
        status, elapsed = queue_pair.write(timeout_s)
        sent = len(trips) + 1
        if status == abi.Status.SUCCESS:
            trips.append(elapsed)
            continue
        done = tuple(trips)
        if status is None or status in _NOBODY:
            waited = f"no acknowledgement within {elapsed:.1f} s" + (", after retries" if status is not None else "")
            return Outcome("rdma", Answer.TIMEOUT, waited, name, sent, len(done), done)
        status_name = abi.name_of(abi.Status, int(status))
        return Outcome("rdma", Answer.BROKEN, f"the other adapter answers with {status_name}", name, sent, len(done), done)
    return Outcome("rdma", Answer.OK, f"{len(trips)} of {len(trips)} acknowledged", name, len(trips), len(trips), tuple(trips))


def serve_rdma(channel: Channel, message: dict[str, object], device: str, port: int, gid_index: int | None, local: str) -> None:
    """The listener's part: a queue pair towards each of the caller's, kept until the caller is done or gone.

    ``device`` is the listener's own choice, ``""`` for the one that has the address the caller came to.
    """
    try:
        with ExitStack() as stack:
            for _ in range(MOST_PAIRS):
                other, source_port = Address.from_json(message.get("address")), _port_in(message)
                chosen, number = (device, port) if device else device_of(local, read_ports())
                queue_pair = stack.enter_context(QueuePairProbe(chosen, number, gid_index))
                queue_pair.connect(other, source_port)
                channel.send({"address": queue_pair.address.to_json()})
                message = channel.receive()
                if message.get("op") != "rdma":
                    return
            raise VerbsError(f"more than {MOST_PAIRS} queue pairs are not made for one caller")
    except VerbsError as error:
        channel.send({"error": str(error)[:500]})


def _port_in(message: Mapping[str, object]) -> int:
    """The source port that the caller asks for; 0 for none, or for one that is none of RoCE's."""
    asked = message.get("source_port", 0)
    return asked if isinstance(asked, int) and LOWEST <= asked <= 65535 else 0


def device_of(local: str, ports: list[RdmaPort]) -> tuple[str, int]:
    """The RDMA port whose GID is this IP address, else the only active one."""
    try:
        address = ipaddress.ip_address(local.partition("%")[0])
    except ValueError:
        address = ipaddress.ip_address("0.0.0.0")  # noqa: S104 - matches no GID
    mapped = address if address.version == 6 else ipaddress.ip_address(f"::ffff:{address}")
    active = [port for port in ports if port.is_up]
    for port in active:
        if any(gid.value == mapped.exploded for gid in port.gids):
            return port.device, port.port
    if len(active) == 1:
        return active[0].device, active[0].port
    names = ", ".join(port.name for port in active) or "none is active"
    raise VerbsError(f"which RDMA port is meant? {names}", "start the listener with --device")
