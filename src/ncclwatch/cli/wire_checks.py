"""What the wire plane can see of a process, for ``doctor``: its network, its RDMA devices, and every function to be probed."""

from __future__ import annotations

from collections.abc import Iterator

from ncclwatch.cli.findings import Finding, Level
from ncclwatch.errors import NcclwatchError
from ncclwatch.probes.instructions import CostClass
from ncclwatch.target.memory import LiveReader
from ncclwatch.target.session import TargetProcess
from ncclwatch.text import clean
from ncclwatch.wire.contexts import find_contexts, find_queues, verbs_files
from ncclwatch.wire.nccl_connections import BUILT_IN, net_connections, network_name
from ncclwatch.wire.plugins import net_plugin
from ncclwatch.wire.session import VerbsUser, why_no_verbs
from ncclwatch.wire.sites import data_path_sites


def wire_findings(target: TargetProcess) -> Iterator[Finding]:
    """Network and wire plane of one process that was sampled just now; nothing is probed."""
    name = f"pid {target.pid}"
    networks = sorted({n for state in target.communicator_states if (n := network_name(target.decoder, state))})
    plugin = net_plugin(target.pid, target.mappings())
    connections = net_connections(target.decoder, target.load_bias, target.communicator_states)
    about = ", ".join(clean(network, 60) for network in networks) or "none yet"
    detail = f"{about}; {len(connections)} connections over it" + (f"; {plugin}" if str(plugin) else "")
    data = {
        "networks": networks,
        "plugin_files": list(plugin.files),
        "plugin_variable": plugin.variable,
        "connections": len(connections),
        "devices": sorted({one.device for one in connections if one.device}),
    }
    external = [network for network in networks if network not in BUILT_IN]
    hint = "flows are listed with their steps; what the plugin does on the wire is its own" if external else ""
    yield Finding(f"{name} network", Level.INFO if external else Level.OK, detail, hint, data)
    yield from _verbs(target, networks)


def _verbs(target: TargetProcess, networks: list[str]) -> Iterator[Finding]:
    name = f"pid {target.pid} wire"
    files = verbs_files(target.pid)
    user = VerbsUser(target.pid, target.layout, target.load_bias or 0, tuple(networks), target.mappings())
    reason = why_no_verbs(user, files)
    if reason:
        yield Finding(name, Level.INFO, f"no RDMA requests to count: {reason}")
        return
    reader = LiveReader(target.pid)
    try:
        contexts = find_contexts(reader, files, target.layout, target.load_bias or 0)
        pairs, queues = find_queues(reader, contexts) if contexts else ([], [])
        sites = data_path_sites(target.pid, reader.mappings(), contexts, pairs, queues)
    except NcclwatchError as error:
        yield Finding(name, Level.GAP, error.message, error.hint)
        return
    finally:
        reader.close()
    missing = sorted({file.device for file in files} - {context.device for context in contexts})
    entries = [site for site in sites if not site.on_return]
    dear = [site.role for site in entries if site.cost is CostClass.SINGLE_STEPPED]
    detail = f"{', '.join(sorted({context.device for context in contexts})) or 'no device resolved'}; {len(pairs)} queue pairs; "
    detail += f"{len(entries)} functions to probe" + (f", {', '.join(dear)} single-stepped (dear)" if dear else "")
    data = {
        "devices": [{"device": context.device, "found_by": context.found_by, "port": context.port} for context in contexts],
        "unresolved": missing,
        "queue_pairs": len(pairs),
        "sites": [
            {"function": site.role, "library": site.library, "offset": site.offset, "cost_class": str(site.cost)}
            for site in entries
        ],
    }
    if missing:
        hint = "its open context was not found in memory: report it with the output of 'ncclwatch doctor --json'"
        yield Finding(name, Level.GAP, f"{detail}; not resolved: {', '.join(missing)}", hint, data)
    else:
        yield Finding(name, Level.OK, detail, data=data)
