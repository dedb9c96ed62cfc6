"""The recipes in packaging/: manifests by schema, and every one of them by what ncclwatch itself takes and needs."""

from __future__ import annotations

import configparser
import re
import subprocess
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ncclwatch.cli import main
from ncclwatch.messaging.privileges import CAPABILITIES

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"

NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """An object that may have these fields and no others: a field that is misspelt is found."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


METADATA = closed({"name": NAME, "namespace": NAME, "labels": LABELS, "annotations": LABELS}, "name")
CONTAINER = closed(
    {
        "name": NAME,
        "image": {"type": "string", "minLength": 1},
        "args": {"type": "array", "items": {"type": "string"}},
        "command": {"type": "array", "items": {"type": "string"}},
        "env": {
            "type": "array",
            "items": closed({"name": {"type": "string"}, "value": {"type": "string"}, "valueFrom": {"type": "object"}}, "name"),
        },
        "ports": {
            "type": "array",
            "items": closed(
                {"name": NAME, "containerPort": {"type": "integer", "minimum": 1, "maximum": 65535}}, "containerPort"
            ),
        },
        "resources": closed({"requests": LABELS, "limits": LABELS}),
        "securityContext": closed(
            {
                "runAsUser": {"type": "integer"},
                "runAsNonRoot": {"type": "boolean"},
                "privileged": {"const": False},
                "allowPrivilegeEscalation": {"type": "boolean"},
                "readOnlyRootFilesystem": {"type": "boolean"},
                "capabilities": closed(
                    {"add": {"type": "array", "items": {"type": "string"}}, "drop": {"const": ["ALL"]}}, "drop"
                ),
            }
        ),
        "volumeMounts": {
            "type": "array",
            "items": closed(
                {"name": NAME, "mountPath": {"type": "string", "pattern": "^/"}, "readOnly": {"type": "boolean"}},
                "name",
                "mountPath",
            ),
        },
    },
    "name",
    "image",
)
VOLUME_KINDS = {kind: {"type": "object"} for kind in ("secret", "projected", "hostPath", "emptyDir")}
POD = closed(
    {
        "hostPID": {"type": "boolean"},
        "shareProcessNamespace": {"type": "boolean"},
        "containers": {"type": "array", "items": CONTAINER, "minItems": 1},
        "volumes": {
            "type": "array",
            "items": {**closed({"name": NAME, **VOLUME_KINDS}, "name"), "minProperties": 2, "maxProperties": 2},
        },
        "tolerations": {"type": "array"},
        "nodeSelector": LABELS,
        "securityContext": closed(
            {n: {"type": ["integer", "boolean"]} for n in ("runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup")}
        ),
    },
    "containers",
)
TEMPLATE = closed({"metadata": {"type": "object"}, "spec": POD}, "metadata", "spec")
NOT_LOADED = {"absl-py", "immutabledict", "pandas"}
"""OR-tools names them; its solver, which is all that is used of it, loads none of them."""
SELECTOR = closed({"matchLabels": LABELS}, "matchLabels")
CLAIM = closed(
    {
        "accessModes": {"const": ["ReadWriteOnce"]},
        "resources": closed({"requests": closed({"storage": {"type": "string"}}, "storage")}, "requests"),
    },
    "accessModes",
    "resources",
)
SPECS = {
    ("v1", "Namespace"): None,
    ("v1", "Pod"): POD,
    ("v1", "Service"): closed(
        {"selector": LABELS, "ports": {"type": "array", "minItems": 1}, "type": {"type": "string"}}, "selector", "ports"
    ),
    ("apps/v1", "Deployment"): closed(
        {
            "replicas": {"enum": [1, 2]},
            "strategy": {"const": {"type": "Recreate"}},
            "selector": SELECTOR,
            "template": TEMPLATE,
        },
        "selector",
        "template",
        "replicas",
    ),
    ("apps/v1", "StatefulSet"): closed(
        {
            "serviceName": NAME,
            "replicas": {"const": 1},
            "selector": SELECTOR,
            "template": TEMPLATE,
            "volumeClaimTemplates": {"type": "array", "items": closed({"metadata": METADATA, "spec": CLAIM}, "metadata", "spec")},
        },
        "serviceName",
        "selector",
        "template",
    ),
    ("apps/v1", "DaemonSet"): closed({"selector": SELECTOR, "template": TEMPLATE}, "selector", "template"),
}


def documents() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for file in sorted((PACKAGING / "kubernetes").glob("*.yaml")):
        found += [(f"{file.name}:{data['kind']}", data) for data in yaml.safe_load_all(file.read_text()) if data]
    return found


@pytest.mark.parametrize(("name", "data"), documents())
def test_manifests_are_what_kubernetes_takes(name: str, data: dict[str, Any]) -> None:
    spec = SPECS[data["apiVersion"], data["kind"]]
    properties: dict[str, Any] = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": METADATA}
    if spec is not None:
        properties["spec"] = spec
    jsonschema.validate(data, closed(properties, *properties))


def pod_of(data: dict[str, Any]) -> dict[str, Any] | None:
    spec = data.get("spec", {})
    pod: dict[str, Any] | None = spec if data["kind"] == "Pod" else spec.get("template", {}).get("spec")
    return pod


def ncclwatch_containers() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    pods = [(name, pod) for name, data in documents() if (pod := pod_of(data))]
    return [(name, pod, c) for name, pod in pods for c in pod["containers"] if c["image"].startswith("ncclwatch")]


def command_of(words: Sequence[str]) -> tuple[str, ...]:
    """The words that name a command: ``fleet hear``."""
    return tuple(takewhile(lambda word: not word.startswith("-"), words))


def options_of(*command: str) -> set[str]:
    found: Any = typer.main.get_command(main.application())
    for word in command:
        found = found.commands[word]
    return {option for parameter in found.params for option in parameter.opts}


@pytest.mark.parametrize(("name", "pod", "container"), ncclwatch_containers())
def test_containers_run_commands_there_are_with_what_they_need(name: str, pod: dict[str, Any], container: dict[str, Any]) -> None:
    arguments, command = container["args"], command_of(container["args"])
    assert {word for word in arguments if word.startswith("--")} <= options_of(*command)
    assert "--keys" in arguments, "nothing speaks over a network without keys"
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    added = {f"CAP_{word}" for word in container["securityContext"]["capabilities"].get("add", [])}
    if command == ("agent",):
        assert added == set(CAPABILITIES)
        assert pod.get("hostPID") or pod.get("shareProcessNamespace"), "it has to see the job's processes"
        assert any(arguments[arguments.index("--spool") + 1].startswith(mount) for mount in mounts)
        assert "/tmp" in mounts, "BCC compiles there"
    else:
        assert not added


MEASURED = {
    "agent": (0.046, 121),
    "engine": (0.61, 274),
    "fleet hear": (0.95, 127),
    "fleet judge": (0.93, 187),
    "serve": (0.05, 102),
}
"""Share of a core and MiB by command: an agent of 8 ranks, an engine of 4,096 (docs/sidecar.md); one of two workers, the judge,
of 8,192 ranks with what the program itself takes (docs/fleet.md); a page of a few jobs: what it keeps is bounded by job.
"""


@pytest.mark.parametrize(("name", "pod", "container"), ncclwatch_containers())
def test_requests_follow_what_was_measured(name: str, pod: dict[str, Any], container: dict[str, Any]) -> None:
    cores, mebibytes = MEASURED[" ".join(command_of(container["args"]))]
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    cpu = float(requests["cpu"].removesuffix("m")) / (1000 if requests["cpu"].endswith("m") else 1)
    assert cores <= cpu <= 2 * cores
    assert mebibytes <= size_of(requests["memory"]) <= 2 * mebibytes < size_of(limits["memory"])
    assert "cpu" not in limits, "who waits for a quota is late with what it has to say"


def size_of(text: str) -> int:
    """MiB."""
    return int(text[:-2]) * {"Mi": 1, "Gi": 1024}[text[-2:]]


def test_selectors_select_what_their_templates_make() -> None:
    labels: list[dict[str, str]] = []
    for _, data in documents():
        if "template" in data.get("spec", {}):
            made = data["spec"]["template"]["metadata"]["labels"]
            assert data["spec"]["selector"]["matchLabels"].items() <= made.items()
            labels.append(made)
    for _, data in documents():
        if data["kind"] == "Service":
            assert any(data["spec"]["selector"].items() <= made.items() for made in labels)


@pytest.mark.parametrize("file", sorted((PACKAGING / "systemd").glob("*.service")), ids=lambda file: file.name)
def test_units(file: Path) -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(file)
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    words = unit["Service"]["ExecStart"].split()
    assert words[0].endswith("/ncclwatch")
    command = command_of(words[1:])
    assert {word for word in words if word.startswith("--")} <= options_of(*command)
    bounding = set(unit["Service"]["CapabilityBoundingSet"].split())
    assert set(CAPABILITIES) <= bounding if command == ("agent",) else not bounding
    for name in re.findall(r"\$\{(\w+)\}", unit["Service"]["ExecStart"]):
        assert f"Set {name} in {unit['Service']['EnvironmentFile']}" in file.read_text()
    assert unit["Service"]["Restart"] == "always"


@pytest.mark.parametrize("file", sorted((PACKAGING / "slurm").glob("*.sh")), ids=lambda file: file.name)
def test_slurm_scripts_are_shell_and_never_fail_a_job(file: Path) -> None:
    subprocess.run(["sh", "-n", str(file)], check=True, timeout=120)
    assert file.stat().st_mode & 0o111
    done = subprocess.run(["sh", str(file)], env={"PATH": "/usr/bin:/bin", "NCCLWATCH": "/nonexistent"}, check=False, timeout=120)
    assert done.returncode == 0
    text = file.read_text()
    for line in re.findall(r'"\$NCCLWATCH" (agent .*(?:\\\n.*)*)', text):
        assert set(re.findall(r"--[a-z-]+", line)) <= options_of("agent")


def test_the_image_holds_what_the_package_needs() -> None:
    text = (PACKAGING / "Dockerfile").read_text()
    copied = [word for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for word in source.split()]
    for word in copied:
        assert (ROOT / word).exists(), word
    assert set(project()["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]) <= set(copied)
    wanted = {"python3", "python3-venv", "python3-bpfcc"}
    assert wanted <= set(re.findall(r"[a-z0-9-]+", text))


def test_the_image_holds_what_runs_and_nothing_else() -> None:
    [cut] = re.findall(r"(sed '\S+ \S+' requirements\.txt)", (PACKAGING / "Dockerfile").read_text())
    kept = subprocess.run(cut, shell=True, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout  # noqa: S602
    installed = {canonicalize_name(line.partition("==")[0]) for line in kept.splitlines() if "==" in line}
    needed = closure([*project()["project"]["dependencies"], *chain(*project()["project"]["optional-dependencies"].values())])
    assert installed == needed - NOT_LOADED


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def closure(texts: Iterable[str]) -> set[str]:
    """Names of what is needed, and of what that needs in turn, as the packages themselves say."""
    found: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in texts]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (key := (canonicalize_name(requirement.name), wanted)) not in found:
                found.add(key)
                with suppress(metadata.PackageNotFoundError):
                    waiting += [(Requirement(text), wanted) for text in metadata.requires(requirement.name) or ()]
    return {name for name, _ in found}
