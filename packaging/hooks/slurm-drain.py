#!/usr/bin/env python3
"""Drain the node of a culprit in Slurm, with the verdict as reason: for `ncclwatch ... --on-verdict slurm-drain.py`.

Reads a verdict (ncclwatch.verdict/1) from standard input. It drains only for the classes given (default: hardware), and no more
nodes than --most: a verdict that names many nodes is about something that they share. Who runs it needs the rights of a Slurm
operator. Nothing is drained twice: Slurm itself keeps the first reason of a node that is drained already.
"""

import argparse
import json
import re
import subprocess
import sys

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62})")
MAX_INPUT = 16 << 20


def nodes_of(verdict):
    """Slurm's names of the nodes of the culprits; a name that is none is left out."""
    found = []
    for culprit in verdict.get("culprits") or []:
        ticket = culprit.get("ticket") or {}
        name = ticket.get("node") or culprit.get("host") or ""
        if NAME.fullmatch(name) and name not in found:
            found.append(name)
    return found


def reason_of(verdict, node):
    """A line that says who, what and how sure, with what a ticket needs."""
    parts = ["ncclwatch %s: %s (%.0f%%)" % (verdict.get("id"), verdict.get("class"), 100 * float(verdict.get("confidence") or 0))]
    for culprit in verdict.get("culprits") or []:
        ticket = culprit.get("ticket") or {}
        if (ticket.get("node") or culprit.get("host")) != node:
            continue
        parts.append("rank %s" % culprit.get("rank"))
        parts += [str(value) for value in (ticket.get("gpu_uuid"), ",".join(ticket.get("nics") or [])) if value]
        parts += ["job %s" % ticket["job"]] if ticket.get("job") else []
        parts.append(str(culprit.get("reason") or ""))
        break
    return re.sub(r"[^ -~]", "?", "; ".join(part for part in parts if part))[:500]


def main():
    """Drain, or say what would be drained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--class", dest="classes", default="hardware", help="classes of verdicts, with commas")
    parser.add_argument("--most", type=int, default=1, help="drain nothing where more nodes are named")
    parser.add_argument("--scontrol", default="scontrol", help="the program")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    asked = parser.parse_args()
    verdict = json.loads(sys.stdin.buffer.read(MAX_INPUT))
    if verdict.get("class") not in asked.classes.split(","):
        print("nothing to do for class %s" % verdict.get("class"))
        return 0
    nodes = nodes_of(verdict)
    if not nodes or len(nodes) > asked.most:
        print("drained none: %d nodes are named, --most is %d" % (len(nodes), asked.most))
        return 0
    for node in nodes:
        words = [asked.scontrol, "update", "NodeName=" + node, "State=DRAIN", "Reason=" + reason_of(verdict, node)]
        if asked.dry_run:
            print("would run: " + " ".join(words))
            continue
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode:
            print("scontrol failed for %s: %s" % (node, done.stderr.strip()[:300]))
            return 1
        print("drained " + node)
    return 0


if __name__ == "__main__":
    sys.exit(main())
