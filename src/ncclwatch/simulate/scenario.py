"""A scenario: one training job, what goes wrong in it, and what a diagnosis should say. Read from TOML, validated, no I/O
otherwise.

The same file drives the real job on the CPU testbed and the simulation. Times are in the unit of the field's suffix
(``_s`` seconds, ``_ms``, ``_us``); message sizes are bytes of the whole message as NCCL's caller states it.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from ncclwatch.errors import UsageError
from ncclwatch.model.verdict import VerdictClass


class Schedule(StrEnum):
    """Order of forward and backward passes on a pipeline stage."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved-1f1b"


class FaultKind(StrEnum):
    """What goes wrong. The last word of each comment says what ``strength`` means for it."""

    STOP = "stop"  # SIGSTOP, SIGCONT after duration_s
    KILL = "kill"  # SIGKILL
    CRASH = "crash"  # ends by itself (strength: exit status), the others' watchdog aborts them duration_s later
    SKIP = "skip"  # leaves out one collective and goes on
    NEVER_ENTERS = "never-enters"  # the host never makes the call (stuck in its own code)
    OTHER_OPERATION = "other-operation"  # enters another collective than its peers
    OTHER_SIZE = "other-size"  # strength: factor on the size
    OTHER_TYPE = "other-type"  # same count, element size times strength
    SWAP = "swap"  # order of two collectives on two communicators swapped
    GPU_STALL = "gpu-stall"  # the kernel stops consuming
    PROXY_STALL = "proxy-stall"  # the proxy thread stops
    LINK_DOWN = "link-down"
    INIT_MISSING = "init-missing"  # never reaches communicator creation
    SLOW_GPU = "slow-gpu"  # strength: factor on compute time (power limit)
    HOST_LOAD = "host-load"  # extra compute load on every rank of the host; strength: factor
    GC_PAUSE = "gc-pause"  # pause every period_s; strength: seconds of a pause
    SLOW_LOADER = "slow-loader"  # strength: extra seconds an iteration
    CPU_LIMIT = "cpu-limit"  # cgroup or affinity on one rank; strength: factor on host time
    FEW_CPUS = "few-cpus"  # one host with few CPUs; strength: factor on host time of all its ranks
    SLOW_COPY = "slow-copy"  # PCIe downgrade; strength: extra seconds a micro-batch
    SLOW_LINK = "slow-link"  # strength: factor on the transfer time, delay_ms added
    LOSSY_LINK = "lossy-link"  # strength: probability of a retransmission, delay_ms each
    NIC_LIMIT = "nic-limit"  # every link of one NIC; strength: factor
    BACKGROUND_TRAFFIC = "background-traffic"  # links of a host; strength: factor, acknowledgements delayed
    PROXY_SLEEP = "proxy-sleep"  # the proxy sleeps at random; strength: seconds of a sleep, period_s mean distance


PROGRAM_FAULTS = frozenset(
    {FaultKind.SKIP, FaultKind.OTHER_OPERATION, FaultKind.OTHER_SIZE, FaultKind.OTHER_TYPE, FaultKind.SWAP}
)
"""Faults that change what a rank calls, so that ranks of one stage no longer run the same program."""

LINK_FAULTS = frozenset({FaultKind.LINK_DOWN, FaultKind.SLOW_LINK, FaultKind.LOSSY_LINK})


class LookalikeKind(StrEnum):
    """Harmless things that resemble trouble."""

    CHECKPOINT = "checkpoint"  # all ranks write for seconds
    WARMUP = "warmup"  # the first iterations take times as long
    DATA_LOADING = "data-loading"  # every rank waits equally long for data
    BARRIER = "barrier"  # an AllReduce of 4 bytes over all ranks after an equal wait
    UNEVEN_STAGES = "uneven-stages"  # one stage computes longer by design, always
    EVALUATION = "evaluation"  # forward passes only, for some iterations
    EMPTY_STEP = "pause"  # the whole job idles between two iterations


class ScoreClass(StrEnum):
    """Rows of the scoreboard. H1-H3 and S1-S3 as in CCL-D section 2.2; fail-stop is counted with H1.

    ``unseen``: a fault where nobody looks (a node without agent): the right answer is that it is unknown.
    """

    H1 = "H1"
    H2 = "H2"
    H3 = "H3"
    S1 = "S1"
    S2 = "S2"
    S3 = "S3"
    INIT_HANG = "init-hang"
    DEADLOCK = "deadlock"
    UNSEEN = "unseen"
    CLEAN = "clean"

    @property
    def quiet(self) -> bool:
        """Whether nobody must be accused."""
        return self in (ScoreClass.UNSEEN, ScoreClass.CLEAN)


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel layout. ``world = tp × cp × dp × pp``; experts are spread over ``ep`` of the ``cp × dp`` ranks.

    ``ranks_per_node`` ranks share a host and its NICs.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    ranks_per_node: int = 8

    @property
    def world(self) -> int:
        """Ranks in the job."""
        return self.tp * self.cp * self.dp * self.pp


@dataclass(frozen=True, slots=True)
class Workload:
    """What an iteration does. Compute times are of one rank, one micro-batch, one chunk; jitter is relative.

    ``grad_norm`` adds an AllReduce of 4 bytes over each copy of the model, ``gather_communicator`` gathers parameters on a
    communicator of their own, and ``merge_exchanges`` joins neighbouring exchanges between stages into one grouped call: the
    testbed's job does all three.
    """

    schedule: Schedule = Schedule.ONE_F_ONE_B
    micro_batches: int = 4
    virtual_stages: int = 1
    layers: int = 2
    iterations: int = 8
    sequence_parallel: bool = False
    forward_ms: float = 20.0
    backward_ms: float = 40.0
    optimizer_ms: float = 10.0
    loader_ms: float = 2.0
    jitter: float = 0.02
    tp_bytes: int = 1 << 20
    cp_bytes: int = 1 << 20
    ep_bytes: int = 1 << 20
    pp_bytes: int = 1 << 20
    dp_bytes: int = 8 << 20
    host_ahead: int = 4
    grad_norm: bool = False
    gather_communicator: bool = False
    merge_exchanges: bool = False


@dataclass(frozen=True, slots=True)
class Network:
    """The library and the paths between ranks. Rates are bytes a second divided by 1e9; ``nccl`` decides what counters count.

    ``net`` is ``ib`` (a send waits until the receiver has posted a buffer) or ``socket`` (the kernels' buffers take up to
    ``socket_buffer_bytes`` of a connection first). ``intra_node`` is the transport between ranks of a host: ``net`` (as on the
    testbed, each rank its own host id), ``shm`` or ``p2p``.
    """

    nccl: str = "2.27.5"
    algorithm: str = "Ring"
    protocol: str = "Simple"
    net: str = "ib"
    socket_buffer_bytes: int = 8 << 20
    intra_node: str = "p2p"
    channels: int = 2
    buffer_bytes: int = 4 << 20
    p2p_chunk_bytes: int = 1 << 17
    nic_rate: float = 40.0
    nic_latency_us: float = 10.0
    local_rate: float = 200.0
    local_latency_us: float = 3.0
    step_us: float = 2.0
    call_us: float = 5.0
    launch_us: float = 10.0
    init_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What the collectors see, and how badly. ``planes`` that are not listed are missing on every node."""

    planes: tuple[str, ...] = ("calls", "state")
    missing_nodes: tuple[int, ...] = ()
    clock_offset_ms: float = 2.0
    clock_drift_ppm: float = 5.0
    loss: float = 0.0
    late_fraction: float = 0.0
    late_ms: float = 0.0
    state_period_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It strikes ``rank`` (or the host of it), or the link from ``rank`` to ``peer`` in ring direction.

    The start is ``start_s`` after the first iteration began, or the first operation of ``role`` that the rank calls in
    ``iteration`` (the ``occurrence``-th, counted from 0) plus ``offset_ms`` after it began. ``duration_s`` may be ``inf``.
    """

    kind: FaultKind
    rank: int
    peer: int | None = None
    start_s: float | None = None
    iteration: int | None = None
    role: str = ""
    occurrence: int = 0
    offset_ms: float = 0.0
    duration_s: float = math.inf
    strength: float = 1.0
    period_s: float = 1.0
    delay_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Lookalike:
    """One harmless event; ``iteration`` is the first it concerns, ``count`` how many."""

    kind: LookalikeKind
    iteration: int = 0
    count: int = 1
    duration_s: float = 1.0
    factor: float = 1.0
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a diagnosis should say. ``verdicts`` are the verdict classes that are right; empty with class ``clean``.

    ``ranks`` are the culprits (global ranks); ``stage`` words of which one must be in the verdict's stage or communicator role;
    ``link`` is (source, destination) as global ranks. ``also`` lists ranks that may be named without being wrong.
    """

    score_class: ScoreClass
    verdicts: tuple[VerdictClass, ...] = ()
    ranks: tuple[int, ...] = ()
    also: tuple[int, ...] = ()
    stage: tuple[str, ...] = ()
    link: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario file. ``tags`` choose sets: ``ci`` for the fixed set, ``testbed`` where the real job can do it, ``scale`` for
    large ones.
    """

    name: str
    title: str
    seed: int
    expect: Expectation
    layout: Layout = field(default_factory=Layout)
    workload: Workload = field(default_factory=Workload)
    network: Network = field(default_factory=Network)
    observe: Observation = field(default_factory=Observation)
    faults: tuple[Fault, ...] = ()
    lookalikes: tuple[Lookalike, ...] = ()
    tags: tuple[str, ...] = ()
    source: str = ""


_RECORD = TypeVar("_RECORD")
_TRANSPORTS = ("net", "shm", "p2p")
_PLANES = ("calls", "state", "timing", "wire")
ROLES = ("tp", "cp", "ep", "pp", "dp", "gather", "mp", "world")


def load(path: Path) -> Scenario:
    """Read and validate one scenario file; raises :class:`UsageError` with file and field for anything wrong."""
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read scenario {path.name}", str(error)) from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path.name} is not TOML", str(error)) from error
    data.setdefault("name", path.stem)
    return parse(data, path.name)


def load_all(folder: Path, tag: str = "") -> list[Scenario]:
    """Every scenario of a folder in order of name, or those that carry ``tag``; names must be unique."""
    scenarios = [load(path) for path in sorted(folder.glob("*.toml"))]
    names = [scenario.name for scenario in scenarios]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two scenarios are called {name}", "names are the keys of the scoreboard; rename one")
    return [scenario for scenario in scenarios if not tag or tag in scenario.tags]


def parse(data: dict[str, Any], where: str = "scenario") -> Scenario:
    """Build a scenario from plain TOML data and check what single fields cannot."""
    scenario = _build(Scenario, data, where)
    _check(scenario, where)
    return scenario


def _build(cls: type[_RECORD], data: object, where: str) -> _RECORD:
    if not isinstance(data, dict):
        raise UsageError(f"{where}: expected a table", f"fields of {cls.__name__}")
    hints = typing.get_type_hints(cls)
    names = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(names))
    if unknown:
        raise UsageError(f"{where}: unknown field {unknown[0]!r}", "known: " + ", ".join(sorted(names)))
    values = {key: _convert(hints[key], value, f"{where}: {key}") for key, value in data.items()}
    for name, f in names.items():
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UsageError(f"{where}: field {name!r} is missing", f"every {cls.__name__.lower()} needs it")
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{where}: expected a list", repr(value))
        inner = typing.get_args(hint)[0]
        return tuple(_convert(inner, item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin in (types.UnionType, typing.Union):
        inner = next(a for a in typing.get_args(hint) if a is not type(None))
        return _convert(inner, value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        if value not in {str(m) for m in hint}:
            raise UsageError(f"{where}: {value!r} is not known", "one of " + ", ".join(str(m) for m in hint))
        return hint(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UsageError(f"{where}: expected {hint.__name__}", repr(value))
    return value


def _require(condition: bool, where: str, what: str, hint: str = "") -> None:
    if not condition:
        raise UsageError(f"{where}: {what}", hint)


def _check(scenario: Scenario, where: str) -> None:
    layout, work, net = scenario.layout, scenario.workload, scenario.network
    for name in ("tp", "pp", "dp", "ep", "cp", "ranks_per_node"):
        _require(getattr(layout, name) >= 1, where, f"layout.{name} must be at least 1")
    _require((layout.dp * layout.cp) % layout.ep == 0, where, "layout.ep must divide dp × cp")
    for name in ("micro_batches", "virtual_stages", "layers", "iterations", "host_ahead"):
        _require(getattr(work, name) >= 1, where, f"workload.{name} must be at least 1")
    if work.schedule is Schedule.INTERLEAVED:
        _require(layout.pp > 1 and work.virtual_stages > 1, where, "interleaved-1f1b needs pp > 1 and virtual_stages > 1")
        left = work.micro_batches % layout.pp
        _require(
            work.micro_batches >= layout.pp and left == 0, where, "interleaved-1f1b needs micro_batches to be a multiple of pp"
        )
    else:
        _require(work.virtual_stages == 1, where, "virtual_stages > 1 needs schedule interleaved-1f1b")
    for name in ("forward_ms", "backward_ms", "optimizer_ms", "loader_ms", "jitter"):
        _require(0 <= getattr(work, name) < math.inf, where, f"workload.{name} must not be negative")
    for name in ("nic_rate", "local_rate"):
        _require(getattr(net, name) > 0, where, f"network.{name} must be positive")
    _require(net.intra_node in _TRANSPORTS, where, f"network.intra_node {net.intra_node!r} is not known", ", ".join(_TRANSPORTS))
    _require(net.net in ("ib", "socket"), where, "network.net must be ib or socket")
    _require(net.algorithm in ("Ring", "Tree"), where, "network.algorithm must be Ring or Tree")
    _require(net.protocol in ("Simple", "LL", "LL128"), where, "network.protocol must be Simple, LL or LL128")
    _require(1 <= net.channels <= 64, where, "network.channels must be 1 to 64")
    _require(len(net.nccl.split(".")) == 3 and net.nccl.replace(".", "").isdigit(), where, "network.nccl must be like 2.27.5")
    for plane in scenario.observe.planes:
        _require(plane in _PLANES, where, f"observe.planes: {plane!r} is not known", ", ".join(_PLANES))
    _require(0 <= scenario.observe.loss < 1, where, "observe.loss must be in [0, 1)")
    _require(0 <= scenario.observe.late_fraction <= 1, where, "observe.late_fraction must be in [0, 1]")
    _require(scenario.observe.state_period_s > 0, where, "observe.state_period_s must be positive")
    for fault in scenario.faults:
        _check_fault(fault, scenario, f"{where}: fault {fault.kind}")
    for event in scenario.lookalikes:
        _require(0 <= event.iteration < work.iterations, where, f"lookalike {event.kind}: iteration out of range")
    _check_expectation(scenario, where)


def _check_fault(fault: Fault, scenario: Scenario, where: str) -> None:
    world = scenario.layout.world
    _require(0 <= fault.rank < world, where, f"rank {fault.rank} is not in a job of {world}")
    if fault.kind in LINK_FAULTS:
        _require(
            fault.peer is not None and 0 <= fault.peer < world and fault.peer != fault.rank,
            where,
            "a link needs another rank as peer",
        )
    _require(fault.duration_s > 0, where, "duration_s must be positive")
    if fault.kind is FaultKind.INIT_MISSING:
        return
    _require((fault.start_s is None) != (fault.iteration is None), where, "give start_s or iteration, not both or none")
    if fault.kind in PROGRAM_FAULTS:
        _require(fault.iteration is not None, where, "a fault of the program needs iteration (and role)")
    if fault.iteration is not None:
        _require(0 <= fault.iteration < scenario.workload.iterations, where, "iteration out of range")
    _require(fault.role in ("", *ROLES), where, f"role {fault.role!r} is not known", ", ".join(ROLES))


def _check_expectation(scenario: Scenario, where: str) -> None:
    expect = scenario.expect
    clean = expect.score_class is ScoreClass.CLEAN
    _require(clean == (not scenario.faults), where, "a clean scenario has no faults, and only a clean one has none")
    quiet = expect.score_class.quiet
    _require(quiet == (not expect.verdicts), where, "a scenario with a visible fault needs expect.verdicts, another has none")
    _require(all(v.accuses for v in expect.verdicts), where, "expect.verdicts must accuse")
    _require(
        all(0 <= r < scenario.layout.world for r in (*expect.ranks, *expect.also, *expect.link)),
        where,
        "expected rank out of range",
    )
    _require(len(expect.link) in (0, 2), where, "expect.link is [source, destination]")
