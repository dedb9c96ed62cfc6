"""The numbers of libibverbs' ABI and of our own map layouts, against what the C compiler makes of the headers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ncclwatch.wire import abi, layouts

PROBES = Path(__file__).resolve().parents[3] / "bpftrace_probes"
VERBS_HEADER = Path("/usr/include/infiniband/verbs.h")

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
needs_verbs = pytest.mark.skipif(not VERBS_HEADER.exists(), reason="libibverbs-dev is not installed")


def evaluate(folder: Path, includes: str, expressions: list[str]) -> list[int]:
    """What gcc makes of integer expressions."""
    lines = "\n".join(f'printf("%llu\\n", (unsigned long long)({expression}));' for expression in expressions)
    source = folder / "check.c"
    source.write_text(f"#include <stddef.h>\n#include <stdio.h>\n{includes}\nint main(void) {{\n{lines}\nreturn 0; }}\n")
    program = folder / "check"
    subprocess.run(["gcc", "-w", "-o", program, source], check=True, timeout=120)
    output = subprocess.run([program], check=True, capture_output=True, text=True, timeout=120).stdout
    return [int(line) for line in output.split()]


@needs_gcc
@needs_verbs
def test_verbs_abi_matches_the_header(tmp_path: Path) -> None:
    wanted = {
        "offsetof(struct ibv_context, device)": abi.CONTEXT_DEVICE,
        "offsetof(struct ibv_context, ops)": abi.CONTEXT_OPS,
        "offsetof(struct ibv_context, cmd_fd)": abi.CONTEXT_CMD_FD,
        "offsetof(struct ibv_context, async_fd)": abi.CONTEXT_ASYNC_FD,
        "offsetof(struct ibv_context, abi_compat)": abi.CONTEXT_ABI_COMPAT,
        "sizeof(struct ibv_context)": abi.CONTEXT_SIZE,
        "offsetof(struct verbs_context, context) - offsetof(struct verbs_context, sz)": -abi.VERBS_CONTEXT_SZ,
        "offsetof(struct ibv_device, name)": abi.DEVICE_NAME,
        "sizeof(((struct ibv_device *)0)->name)": abi.DEVICE_NAME_SIZE,
        "offsetof(struct ibv_qp, context)": abi.QP_CONTEXT,
        "offsetof(struct ibv_qp, pd)": abi.QP_PD,
        "offsetof(struct ibv_qp, send_cq)": abi.QP_SEND_CQ,
        "offsetof(struct ibv_qp, recv_cq)": abi.QP_RECV_CQ,
        "offsetof(struct ibv_qp, qp_num)": abi.QP_NUM,
        "offsetof(struct ibv_qp, state)": abi.QP_STATE,
        "offsetof(struct ibv_qp, qp_type)": abi.QP_TYPE,
        "sizeof(struct ibv_qp)": abi.QP_SIZE,
        "sizeof(struct ibv_qp_ex)": abi.QP_EX_SIZE,
        "sizeof(struct ibv_cq_ex)": abi.CQ_EX_SIZE,
        "offsetof(struct ibv_cq, context)": abi.CQ_CONTEXT,
    }
    wanted |= {f"(offsetof(struct ibv_context_ops, {name})) / sizeof(void *)": index for name, index in abi.OPS.items()}
    wanted |= {f"offsetof(struct ibv_qp_ex, {name})": offset for name, offset in abi.QP_EX.items()}
    wanted |= {f"offsetof(struct ibv_cq_ex, {name})": offset for name, offset in abi.CQ_EX.items()}
    wanted |= {f"IBV_QPT_{kind.name}": kind.value for kind in abi.QpType}
    wanted |= {f"IBV_QPS_{state.name}": state.value for state in abi.QpState}
    wanted |= {f"IBV_WR_{code.name}": code.value for code in abi.Opcode if code is not abi.Opcode.FLUSH}
    wanted |= {f"IBV_WC_{status.name}": status.value for status in abi.Status}
    values = evaluate(tmp_path, "#include <infiniband/verbs.h>", list(wanted))
    assert dict(zip(wanted, values, strict=True)) == wanted


@needs_gcc
@needs_verbs
def test_kernel_programs_use_the_same_abi(tmp_path: Path) -> None:
    """The #defines and structures of verbs_abi.h."""
    source = (PROBES / "verbs_abi.h").read_text()
    defines = "\n".join(line for line in source.splitlines() if line.startswith("#define ") and "(" not in line.split("/*")[0])
    structures = source[source.index("struct send_wr {") : source.rindex("#endif")]
    wanted = {
        "QP_CONTEXT": "offsetof(struct ibv_qp, context)",
        "QP_SEND_CQ": "offsetof(struct ibv_qp, send_cq)",
        "QP_RECV_CQ": "offsetof(struct ibv_qp, recv_cq)",
        "QP_NUM": "offsetof(struct ibv_qp, qp_num)",
        "CQ_CONTEXT": "offsetof(struct ibv_cq, context)",
        "CQ_EX_STATUS": "offsetof(struct ibv_cq_ex, status)",
        "CQ_EX_WR_ID": "offsetof(struct ibv_cq_ex, wr_id)",
        "QP_EX_WR_ID": "offsetof(struct ibv_qp_ex, wr_id)",
        "QP_EX_WR_FLAGS": "offsetof(struct ibv_qp_ex, wr_flags)",
        "SEND_SIGNALED": "IBV_SEND_SIGNALED",
        "SEND_INLINE": "IBV_SEND_INLINE",
        "WC_RECV": "IBV_WC_RECV",
        "PD_CONTEXT": "offsetof(struct ibv_pd, context)",
        "INIT_ATTR_SEND_CQ": "offsetof(struct ibv_qp_init_attr, send_cq)",
        "INIT_ATTR_SIG_ALL": "offsetof(struct ibv_qp_init_attr, sq_sig_all)",
        "ATTR_STATE_MASK": "IBV_QP_STATE",
        "0 * ATTR_STATE_MASK": "offsetof(struct ibv_qp_attr, qp_state)",
        "offsetof(struct send_wr, next)": "offsetof(struct ibv_send_wr, next)",
        "offsetof(struct send_wr, sg_list)": "offsetof(struct ibv_send_wr, sg_list)",
        "offsetof(struct send_wr, num_sge)": "offsetof(struct ibv_send_wr, num_sge)",
        "offsetof(struct send_wr, opcode)": "offsetof(struct ibv_send_wr, opcode)",
        "offsetof(struct send_wr, flags)": "offsetof(struct ibv_send_wr, send_flags)",
        "offsetof(struct recv_wr, next)": "offsetof(struct ibv_recv_wr, next)",
        "sizeof(struct sge)": "sizeof(struct ibv_sge)",
        "offsetof(struct sge, length)": "offsetof(struct ibv_sge, length)",
        "offsetof(struct work_completion, status)": "offsetof(struct ibv_wc, status)",
        "offsetof(struct work_completion, opcode)": "offsetof(struct ibv_wc, opcode)",
        "offsetof(struct work_completion, bytes)": "offsetof(struct ibv_wc, byte_len)",
        "offsetof(struct work_completion, qp_num)": "offsetof(struct ibv_wc, qp_num)",
        "48": "sizeof(struct ibv_wc)",
        "16": "sizeof(struct ibv_data_buf)",
        "8": "offsetof(struct ibv_data_buf, length)",
    }
    types = "#include <stdint.h>\ntypedef uint64_t u64; typedef uint32_t u32; typedef int32_t s32;\n"
    ours = evaluate(tmp_path, types + defines + "\n" + structures, list(wanted))
    theirs = evaluate(tmp_path, "#include <infiniband/verbs.h>", list(wanted.values()))
    assert dict(zip(wanted, ours, strict=True)) == dict(zip(wanted, theirs, strict=True))


@needs_gcc
def test_map_layouts_match_the_header(tmp_path: Path) -> None:
    pairs = {
        "nwv_qp_key": layouts.QP_KEY,
        "nwv_pending": layouts.PENDING_REQUEST,
        "nwv_sample": layouts.SAMPLE,
        "nwv_qp": layouts.QP,
        "nwv_thread": layouts.THREAD,
        "nwv_config": layouts.CONFIG,
        "nwv_control": layouts.CONTROL,
    }
    wanted = {f"sizeof(struct {struct})": mirror.itemsize for struct, mirror in pairs.items()}
    for struct, mirror in pairs.items():
        assert mirror.names is not None and mirror.fields is not None
        wanted |= {f"offsetof(struct {struct}, {name})": mirror.fields[name][1] for name in mirror.names}
        wanted |= {f"sizeof(((struct {struct} *)0)->{name})": mirror.fields[name][0].itemsize for name in mirror.names}
    wanted["NWV_COUNTERS"] = layouts.COUNTER_SLOTS
    includes = f'#include <linux/types.h>\n#include "{PROBES / "verbs_maps.h"}"'
    values = evaluate(tmp_path, includes, list(wanted))
    assert dict(zip(wanted, values, strict=True)) == wanted


def test_latency_buckets_invert_the_kernels_rule() -> None:
    bounds = layouts.bucket_bounds()
    for bucket in range(layouts.BUCKETS):
        low, high = int(bounds[bucket]), int(bounds[bucket + 1])
        assert kernel_bucket(low) == kernel_bucket(high - 1) == bucket
    assert kernel_bucket(0) == 0
    assert kernel_bucket(1 << 50) == layouts.BUCKETS - 1


def kernel_bucket(ns: int) -> int:
    """``bucket_of`` of verbs.bpf.c."""
    ns = min(max(ns, 32), (1 << 37) - 1)
    octave = ns.bit_length() - 1
    return ((octave - 5) * 4 + ((ns >> (octave - 2)) & 3)) & 127
