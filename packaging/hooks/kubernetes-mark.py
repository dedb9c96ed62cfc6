#!/usr/bin/env python3
"""Mark the node of a culprit in Kubernetes: an event, a node condition, and a taint where one is asked for.

For `ncclwatch engine ... --on-verdict kubernetes-mark.py` in a pod. Reads a verdict (ncclwatch.verdict/1) from standard input and
speaks to the API server with the pod's service account (kubernetes-rbac.yaml has its rights). The event says what happened; the
condition NcclwatchSuspect stays until somebody removes it; with --taint the node takes no new pods (effect NoSchedule: what runs
goes on). Conditions and taints are set only for the classes given (default: hardware) and for no more nodes than --most.
"""

import argparse
import datetime
import json
import os
import re
import ssl
import sys
import urllib.error
import urllib.request

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
TAINT = "ncclwatch.io/suspect"
CONDITION = "NcclwatchSuspect"
MAX_INPUT = 16 << 20


class Api:
    """The API server."""

    def __init__(self, server, account):
        self.server = server
        with open(os.path.join(account, "token")) as file:
            self.token = file.read().strip()
        authority = os.path.join(account, "ca.crt")
        self.context = ssl.create_default_context(cafile=authority) if server.startswith("https") else None

    def call(self, method, path, body=None, kind="application/json"):
        """One request; raises urllib's errors."""
        request = urllib.request.Request(self.server + path, method=method)
        request.add_header("Authorization", "Bearer " + self.token)
        data = None
        if body is not None:
            request.add_header("Content-Type", kind)
            data = json.dumps(body).encode()
        with urllib.request.urlopen(request, data, timeout=8, context=self.context) as answer:
            return json.loads(answer.read(MAX_INPUT) or b"{}")


def now():
    """As Kubernetes writes times."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def message_of(verdict):
    """What people read; at most 1,000 characters, as events allow 1,024."""
    steps = verdict.get("next_steps") or []
    return (str(verdict.get("summary") or "") + (" Next: " + str(steps[0]) if steps else ""))[:1000]


def nodes_of(verdict):
    """Node names of the culprits."""
    found = []
    for culprit in verdict.get("culprits") or []:
        name = ((culprit.get("ticket") or {}).get("node") or culprit.get("host") or "").lower()
        if NAME.fullmatch(name) and name not in found:
            found.append(name)
    return found


def reason_of(verdict):
    """``NcclHardware``."""
    return "Nccl" + "".join(word.capitalize() for word in re.findall(r"[a-z]+", str(verdict.get("class"))))


def event(verdict, node):
    """An event about a node; events of nodes live in the namespace default."""
    stamp = now()
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "type": "Warning",
        "reason": reason_of(verdict),
        "message": message_of(verdict),
        "metadata": {"name": "%s.ncclwatch-%s" % (node[:200], verdict.get("id")), "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
        "source": {"component": "ncclwatch", "host": node},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }


def condition(verdict):
    """A patch of a node's status (strategic: conditions are merged by their type)."""
    stamp = now()
    entry = {
        "type": CONDITION,
        "status": "True",
        "reason": reason_of(verdict),
        "message": message_of(verdict),
        "lastHeartbeatTime": stamp,
        "lastTransitionTime": stamp,
    }
    return {"status": {"conditions": [entry]}}


def taint(api, node, verdict):
    """Add the taint; the version of what was read goes with it, so that nobody's change is lost."""
    known = api.call("GET", "/api/v1/nodes/" + node)
    taints = known.get("spec", {}).get("taints") or []
    if any(one.get("key") == TAINT for one in taints):
        return "was tainted already"
    taints = taints + [{"key": TAINT, "value": str(verdict.get("id")), "effect": "NoSchedule"}]
    body = {"metadata": {"resourceVersion": known["metadata"]["resourceVersion"]}, "spec": {"taints": taints}}
    api.call("PATCH", "/api/v1/nodes/" + node, body, "application/merge-patch+json")
    return "tainted"


def mark(api, node, verdict, asked, marks):
    """Do all that was asked for, one after the other; returns what was done and what failed."""
    strategic = "application/strategic-merge-patch+json"

    def tell():
        api.call("POST", "/api/v1/namespaces/default/events", event(verdict, node))
        return "event"

    def set_condition():
        api.call("PATCH", "/api/v1/nodes/%s/status" % node, condition(verdict), strategic)
        return "condition"

    steps = [("event", tell)]
    steps += [("condition", set_condition)] if marks else []
    steps += [("taint", lambda: taint(api, node, verdict))] if marks and asked.taint else []
    done, failed = [], []
    for name, step in steps:
        if asked.dry_run:
            done.append("would set " + name)
            continue
        try:
            done.append(step())
        except urllib.error.HTTPError as error:
            # An event of this name is there already: it was told before.
            (done if name == "event" and error.code == 409 else failed).append("%s: HTTP %d" % (name, error.code))
        except (OSError, ValueError, KeyError) as error:
            failed.append("%s: %s" % (name, error))
    return done, failed


def main():
    """Mark the nodes of a verdict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--class", dest="classes", default="hardware", help="classes that set condition and taint, with commas")
    parser.add_argument("--most", type=int, default=1, help="set neither where more nodes are named")
    parser.add_argument("--taint", action="store_true", help="also taint the node (NoSchedule)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument("--account", default=ACCOUNT, help="folder of the service account")
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    parser.add_argument("--server", default="https://%s:%s" % (host, port), help="the API server")
    asked = parser.parse_args()
    verdict = json.loads(sys.stdin.buffer.read(MAX_INPUT))
    nodes = nodes_of(verdict)
    marks = verdict.get("class") in asked.classes.split(",") and len(nodes) <= asked.most
    api = None if asked.dry_run else Api(asked.server, asked.account)
    words, status = [], 0
    for node in nodes[:16]:
        done, failed = mark(api, node, verdict, asked, marks)
        words.append("%s: %s" % (node, ", ".join(done + failed)))
        status = status or (1 if failed else 0)
    print("; ".join(words) or "no node is named")
    return status


if __name__ == "__main__":
    sys.exit(main())
