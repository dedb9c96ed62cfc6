"""Advice as files that Slurm and Kubernetes take: variables of NCCL, ports for jobs that want them. Nothing is applied."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping

LIBRARY = "/usr/lib/ncclwatch/libncclwatch_pins.so"
"""Where the files expect ``path_pins/``; both say how to give another place."""
MAX_CONFIG = 1 << 20
"""Fact: a ConfigMap holds 1 MiB at most (Kubernetes, Concepts, ConfigMaps)."""


def slurm(environment: Mapping[str, str], pins: str, heading: str) -> str:
    """A TaskProlog: what it prints as ``export NAME=value`` is set in the task (slurm.conf, TaskProlog).

    ``pins`` is the path of a plan of ports, empty for none. What a job sets itself is left alone.
    """
    lines = [
        "#!/bin/sh",
        f"# {heading}",
        "# srun --task-prolog=THIS_FILE, or TaskProlog in slurm.conf. Remove it, and nothing is left.",
    ]
    for name, value in environment.items():
        lines.append(f'[ -n "${{{_name(name)}+set}}" ] || echo export {_name(name)}={shlex.quote(value)}')
    if pins:
        lines += [
            f"plan={shlex.quote(pins)}",
            f'library="${{NCCLWATCH_PINS_LIBRARY:-{LIBRARY}}}"',
            'if [ -r "$library" ] && [ -r "$plan" ]; then',
            '  echo "export LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}"',
            '  echo "export NCCLWATCH_PATH_PINS=$plan"',
            "  # The library tells ranks by RANK, which srun does not set.",
            '  [ -n "${RANK+set}" ] || echo "export RANK=$SLURM_PROCID"',
            "fi",
        ]
    return "\n".join(lines) + "\n"


def kubernetes(environment: Mapping[str, str], plan: str, heading: str) -> str:
    """A ConfigMap with the variables, one with a plan of ports (empty for none), and in comments how a pod takes them."""
    parts = [
        f"# {heading}",
        "# kubectl apply -f THIS_FILE; in the container of the job:",
        "#   envFrom: [{configMapRef: {name: ncclwatch-paths}}]",
    ]
    variables = {_name(name): value for name, value in environment.items()}
    if plan:
        parts += [
            "#   volumeMounts: [{name: path-pins, mountPath: /etc/ncclwatch}]",
            "# and in the pod: volumes: [{name: path-pins, configMap: {name: ncclwatch-path-pins}}]",
            f"# The image has {LIBRARY}, or LD_PRELOAD names another place; RANK is set by the launcher.",
        ]
        variables |= {"LD_PRELOAD": LIBRARY, "NCCLWATCH_PATH_PINS": "/etc/ncclwatch/plan.pins"}
    parts += _config_map("ncclwatch-paths", variables)
    if plan:
        parts += ["---", *_config_map("ncclwatch-path-pins", {"plan.pins": plan})]
    return "\n".join(parts) + "\n"


def _config_map(name: str, data: Mapping[str, str]) -> list[str]:
    # A text as JSON writes it is one of YAML too.
    rows = [f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in data.items()] or ["  {}"]
    return ["apiVersion: v1", "kind: ConfigMap", "metadata:", f"  name: {name}", "data:", *rows]


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Z][A-Z0-9_]*", text):
        raise ValueError(f"{text!r} is no name of a variable")
    return text
