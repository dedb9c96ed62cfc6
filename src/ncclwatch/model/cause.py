"""Why somebody holds up a job that stands, or why nobody is named: rows of knowledge are matched on it, as on ``SlowCause``."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why somebody holds the job up, as the clause that follows a rank's name, or why nobody is named; a closed list. Verdicts
    fill in ``{detail}`` (what was called, the name of a port); where nobody is named seconds, ends of waits, the communicator.
    """

    # Nobody is named.
    ALL_ENDED = "all have ended"
    ONE_SAMPLE = "only one sample of a process, so progress cannot be told from standstill"
    PROGRESS = "NCCL makes progress"
    PAUSE = "no NCCL counter has moved for {still:.1f} s; a pause of up to {seconds:.0f} s is not yet a hang"
    TCP_TRIES = f"{PAUSE}; what was lost is sent again by TCP"
    NOTHING_OPEN = "no NCCL operation is open"
    NOTHING_SEEN = "NCCL has not moved for {still:.0f} s; what joins the ranks hides whether an operation is open"
    CREATING = "{come} ranks wait in the creation of communicator {communicator}"
    UNSEEN = "nothing moves; the waits lead to {unseen}, which was not observed"
    HIDDEN = "nothing moves; the waits lead to {unseen}, which is joined by a transport the host cannot see into"
    BESIDE_ABSENT = "the waits lead to {ranks}, which has nothing open and may wait for {unseen}, not observed"
    CYCLE_IN_OPERATION = "ranks wait for each other inside one operation; what was read does not single one out"
    CYCLE_OF_CALLS = "ranks wait for each other in a cycle of calls; what was read does not single one out"
    # The operating system or NCCL says so.
    ENDED = "its process has ended"
    ENDED_UNSEEN = "has ended: it is not among the processes of its host, or its peers lost it"
    STOPPED = "its process is stopped by a signal"
    STOPPED_BY_DEBUGGER = "its process is stopped by a debugger"
    NCCL_ERROR = "reports {detail}"
    NOT_JOINED = "has not come to the creation of the communicator"
    # Calls: not made, or others.
    NOT_ENTERED = "has not entered the operation the others wait in"
    NOT_TAKING_PART = "does not take part: data for it lies unread and it waits for nobody"
    NOT_CALLED = "has not called the operation the others have called"
    LEFT_OUT = "has left out an operation that its calls always had here"
    LACKS_CALL = "has not called an operation that the others have called, and waits elsewhere"
    LACKS_OTHER_CALL = "has made as many calls as its peers, but not the one they wait in"
    ALONE_IN_CALL = "is in an operation that its peers are not in: they have ended what they called instead, and gone on"
    WROTE_OTHERWISE = (
        "has called as often as its peers, and written {detail} than their calls amount to: it called something else"
    )
    CALLED_OTHER = "has called {detail}, unlike its peers"
    CALLED_OTHER_AS = "called {detail}, unlike its peers"
    RUNS_ON = "called {detail}"
    COUNTED_OTHER = "has called {detail} where its peers called something else"
    ORDER = "waits in a cycle"
    # GPU and proxy.
    GPU_NOT_BEGUN = "has called the operation, but its GPU has not begun it"
    GPU_STOPPED = "its GPU has stopped in the middle of the operation"
    GPU_RUNNING = "its GPU is in the operation and does not go on, although nothing it needs is missing"
    FLUSH = "data arrived, but the flush to its GPU's memory does not complete"
    PROXY_STALLED = "its proxy thread does not move transfers that could go on"
    PROXY_NOT_BEGUN = "its proxy thread has not begun an operation that is queued"
    # The network.
    LINK = "one end of the link on which data does not arrive"
    CUT_OFF = "data arrives neither at it nor from it: its proxy thread or its network port stands still"
    PORT_RETRIES = "its network port, or the path to it, is slow: no transfer with it ends, though TCP still tries"
    PORT = "its network port {detail}"
    PATH = "nothing that is sent to or from its address is acknowledged: its network port, or the path to it, is dead"
    PATH_END = "one end of a path over which nothing is acknowledged"

    @property
    def label(self) -> str:
        """``gpu-not-begun``."""
        return self.name.lower().replace("_", "-")
