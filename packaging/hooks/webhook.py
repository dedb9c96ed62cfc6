#!/usr/bin/env python3
"""Send a verdict on in Alertmanager's formats: for `ncclwatch ... --on-verdict "webhook.py --url URL"`.

--url URL sends what Alertmanager sends to its webhook receivers (version 4): chat gateways and ticket systems take that.
--alertmanager URL posts an alert to an Alertmanager itself (API v2), which groups, silences and routes it. An alert ends by
itself after --lasts seconds: ncclwatch tells a verdict once.
"""

import argparse
import datetime
import json
import sys
import urllib.error
import urllib.request

MAX_INPUT = 16 << 20
SERIOUS = ("dead", "hardware", "error", "inconsistent", "deadlock")


def stamp(seconds):
    """RFC 3339."""
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def alert(verdict, lasts):
    """One alert: labels say what it is and where, annotations what to do."""
    culprit = (verdict.get("culprits") or [{}])[0]
    ticket = culprit.get("ticket") or {}
    labels = {
        "alertname": "NcclVerdict",
        "class": verdict.get("class"),
        "verdict": verdict.get("id"),
        "severity": "critical" if verdict.get("class") in SERIOUS else "warning",
        "node": ticket.get("node") or culprit.get("host"),
        "rank": culprit.get("rank"),
        "slurm_job": ticket.get("job"),
        "namespace": ticket.get("namespace"),
        "pod": ticket.get("pod"),
        "gpu": ticket.get("gpu_uuid"),
        "nic": ",".join(ticket.get("nics") or []),
    }
    known = verdict.get("knowledge") or []
    annotations = {
        "summary": verdict.get("summary"),
        "confidence": "%.0f%%" % (100 * float(verdict.get("confidence") or 0)),
        "evidence": "\n".join((verdict.get("evidence") or [])[:8]),
        "next": "\n".join(verdict.get("next_steps") or []),
        "known": "\n".join("%s: %s" % (row.get("seen"), row.get("cause")) for row in known if not row.get("defect")),
    }
    begin = float(verdict.get("since") or verdict.get("time") or datetime.datetime.now().timestamp())
    last = float(verdict.get("time") or begin)
    return {
        "labels": {name: str(value) for name, value in labels.items() if value not in (None, "")},
        "annotations": {name: str(value) for name, value in annotations.items() if value},
        "startsAt": stamp(begin),
        "endsAt": stamp(max(last, begin) + lasts),
        "generatorURL": "",
    }


def payload(one):
    """The same as Alertmanager tells its receivers (version 4)."""
    group = '{}:{verdict="%s"}' % one["labels"].get("verdict", "")
    return {
        "version": "4",
        "groupKey": group,
        "truncatedAlerts": 0,
        "status": "firing",
        "receiver": "ncclwatch",
        "groupLabels": {"alertname": "NcclVerdict"},
        "commonLabels": one["labels"],
        "commonAnnotations": one["annotations"],
        "externalURL": "",
        "alerts": [{"status": "firing", "fingerprint": one["labels"].get("verdict", ""), **one}],
    }


def post(url, body, header):
    """Send it; raises urllib's errors."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST")
    if header:
        name, _, value = header.partition(":")
        request.add_header(name.strip(), value.strip())
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.status


def main():
    """Send one verdict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a receiver of Alertmanager's webhooks")
    where.add_argument("--alertmanager", help="an Alertmanager: http://HOST:9093")
    parser.add_argument("--lasts", type=float, default=3600.0, help="seconds until the alert ends by itself")
    parser.add_argument("--header-file", help="a file with one header, NAME: VALUE (authorization)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be sent")
    asked = parser.parse_args()
    one = alert(json.loads(sys.stdin.buffer.read(MAX_INPUT)), asked.lasts)
    url, body = (asked.url, payload(one)) if asked.url else (asked.alertmanager.rstrip("/") + "/api/v2/alerts", [one])
    if asked.dry_run:
        print("would send to %s: %s" % (url, json.dumps(body)))
        return 0
    header = ""
    if asked.header_file:
        with open(asked.header_file) as file:
            header = file.readline()
    try:
        print("sent: HTTP %d" % post(url, body, header))
    except (urllib.error.URLError, OSError, ValueError) as error:
        print("not sent: %s" % error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
