#!/usr/bin/env python3
"""Have dumps made while a job still hangs: for `ncclwatch attach ... --on-verdict "dumps.py --pipe /tmp/trace_ --keep DIR"`.

--pipe PREFIX asks PyTorch for a dump of its Flight Recorder: a line is written into every PREFIX*.pipe of this node
(TORCH_NCCL_DEBUG_INFO_PIPE_FILE=PREFIX and TORCH_NCCL_TRACE_BUFFER_SIZE in the job's environment; PyTorch writes where
TORCH_NCCL_DEBUG_INFO_TEMP_FILE says). --ras HOST:PORT keeps what NCCL's RAS answers; --py-spy keeps the Python stacks of the
culprits that are on this node. Both write into --keep. Asking RAS has crashed jobs of some releases: NVIDIA/nccl#1762, #2346.
"""

import argparse
import errno
import glob
import json
import os
import re
import socket
import stat
import subprocess
import sys
import time

MAX_INPUT = 16 << 20
MAX_ANSWER = 64 << 20
MAX_PIPES, MAX_SUSPECTS = 64, 4
SECONDS = 12.0
"""For one dump: a hook has thirty seconds, and others may be asked for as well."""
ID = re.compile(r"[0-9a-f]{12}")
CLASSES = "not-entered,hardware,inconsistent,deadlock,stopped,init-hang,error,dead"


def ask_pipe(path):
    """Have one process dump its Flight Recorder; what came of it in words."""
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return "nobody listens" if error.errno == errno.ENXIO else error.strerror
    try:
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
            return "no pipe"
        os.write(pipe, b"1\n")
    except OSError as error:
        return error.strerror
    finally:
        os.close(pipe)
    return "asked for its dump"


def ask_ras(host, port):
    """The answer of NCCL's RAS as text; raises OSError. A stopped process may take a connection: then it is tried again."""
    until = time.monotonic() + SECONDS
    while True:
        with socket.create_connection((host, port), timeout=2.0) as talk:
            try:
                talk.sendall(b"CLIENT PROTOCOL 2\n")
                if not talk.recv(256).startswith(b"SERVER PROTOCOL"):
                    raise OSError("no RAS service of NCCL listens there")
            except socket.timeout:
                if time.monotonic() < until:
                    continue
                raise
            talk.sendall(b"TIMEOUT 3\nVERBOSE STATUS\n")
            answer = b""
            while len(answer) < MAX_ANSWER:
                talk.settimeout(max(0.1, until - time.monotonic()))
                more = talk.recv(1 << 16)
                if not more:
                    break
                answer += more
            return answer.partition(b"OK\n")[2]


def stacks_of(program, pid):
    """What py-spy says of a process, without stopping it; raises OSError."""
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            timeout=SECONDS / MAX_SUSPECTS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OSError("py-spy did not end") from None
    return done.stdout + done.stderr


def suspects(verdict):
    """Pids of the culprits on this node."""
    here = socket.gethostname()
    found = [one.get("pid") for one in verdict.get("culprits") or [] if one.get("host") == here]
    return [pid for pid in found if isinstance(pid, int)][:MAX_SUSPECTS]


def keep(folder, name, read):
    """Write what `read` returns into a new file; what came of it in words, and whether that is well."""
    path = os.path.join(folder, name)
    try:
        content = read()
        with open(path, "xb") as file:
            file.write(content)
    except OSError as error:
        return "not kept: %s (%s)" % (path, error), False
    return "kept: %s" % path, True


def wanted(asked, verdict):
    """What is to be kept: names of files, and how each is read."""
    if asked.ras:
        host, _, port = asked.ras.rpartition(":")
        yield "%s-ras.txt" % verdict["id"], lambda: ask_ras(host, int(port))
    for pid in suspects(verdict) if asked.py_spy else ():
        yield "%s-pid-%d.txt" % (verdict["id"], pid), lambda pid=pid: stacks_of(asked.program, pid)


def main():
    """Ask for all dumps; exit status 1 where one of those that are kept here failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--class", dest="classes", default=CLASSES, help="classes of verdicts, with commas")
    parser.add_argument("--pipe", action="append", default=[], help="what the names of PyTorch's pipes begin with")
    parser.add_argument("--ras", help="HOST:PORT of NCCL's RAS (port 28028, unless NCCL_RAS_ADDR says otherwise)")
    parser.add_argument("--py-spy", action="store_true", help="Python stacks of culprits on this node")
    parser.add_argument("--program", default="py-spy", help="py-spy itself")
    parser.add_argument("--keep", help="folder for what RAS and py-spy say")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    asked = parser.parse_args()
    if (asked.ras or asked.py_spy) and not asked.keep:
        parser.error("--ras and --py-spy need --keep FOLDER")
    verdict = json.loads(sys.stdin.buffer.read(MAX_INPUT))
    if verdict.get("class") not in asked.classes.split(",") or not ID.fullmatch(str(verdict.get("id"))):
        print("nothing to do for class %s" % verdict.get("class"))
        return 0
    pipes = sorted(path for prefix in asked.pipe for path in glob.glob(glob.escape(prefix) + "*.pipe"))[:MAX_PIPES]
    if asked.pipe and not pipes:
        print("no pipe on this node begins with %s" % " or ".join(asked.pipe))
    for path in pipes:
        print("%s: %s" % (path, "would be asked for its dump" if asked.dry_run else ask_pipe(path)))
    well = True
    for name, read in wanted(asked, verdict):
        if asked.dry_run:
            print("would keep: %s" % os.path.join(asked.keep, name))
            continue
        said, kept = keep(asked.keep, name, read)
        print(said)
        well = well and kept
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
