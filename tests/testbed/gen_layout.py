"""Write the C++ header with the NCCL layouts that the CUDA stand-in works on, read from libnccl's own debug information.

The stand-in plays the part of NCCL's GPU kernels, so it reads and writes the structures that NCCL keeps for its kernels
(connections, channels, work descriptors). Nothing about them is written down by hand: this build step emits the structures as
the DWARF of exactly that library describes them, with a static_assert for the size of each and the offset of each member, and the
table of device functions (`ncclDevFuncRowToId`) with a name for every entry. A library whose shape is not understood is refused
here, with the reason, rather than guessed at.

Usage: gen_layout.py LIBNCCL HEADER
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import drgn

# Structures the stand-in touches. Those a release does not have are left out, and NCCL_HAS_<name> is then 0.
ROOTS = (
    "dim3",
    "cudaDeviceProp",
    "cudaPointerAttributes",
    "cudaFuncAttributes",
    "cudaLaunchConfig_st",  # up to 2.21 kernels are launched through cudaLaunchKernelExC
    "CUlaunchConfig_st",  # later ones through cuLaunchKernelEx
    "ncclConnFifo",  # from 2.20 on; before, sizesFifo and offsFifo of the connection
    "ncclConnInfo",
    "ncclDevChannelPeer",
    "ncclDevProfiler",  # from 2.27 on: counter and GPU time of a channel's works; 2.26 has plain counters
    "ncclDevChannel",
    "ncclDevComm",
    "ncclKernelComm",  # name of the kernels' communicator since 2.28; ncclDevComm became the public device API
    "ncclDevCommAndChannels",
    "ncclKernelCommAndChannels",
    "ncclWorkElem",  # up to 2.21: fixed-size work elements in a FIFO
    "ncclWorkElemP2p",
    "ncclWorkHeader",
    "ncclWork",
    "ncclDevWorkColl",  # from 2.22 on: batches of variable-size work
    "ncclDevWorkP2p",
    "ncclDevWorkCollReg",
    "ncclDevWorkBcast",
    "ncclDevWorkBatch",
    "ncclDevKernelArgs",
)
ENUMS = (
    "cudaDeviceAttr",
    "CUpointer_attribute_enum",
    "ncclWorkType",
    "ncclWorkP2PType",
    "ncclDevWorkType",
    "ncclDevWorkStorageType",
    "ncclDevRedOp_t",
)
# Members added or moved over time that the code asks for by name: NCCL_HAS_<struct>_<member> is 1 or 0.
MEMBERS = (
    ("ncclConnInfo", "stepSize"),  # from 2.21
    ("ncclConnInfo", "connFifo"),  # from 2.20
    ("ncclDevChannel", "workCounter"),  # from 2.26
    ("ncclDevWorkColl", "netRegUsed"),  # from 2.24
    ("ncclDevWorkColl", "recvbuffRmtAddrs"),  # from 2.23: rings on registered buffers
    ("ncclDevWorkP2p", "sendNetReg"),  # from 2.24
    ("ncclDevWorkColl", "profilerEnabled"),  # from 2.27: only where a profiler wants them
    ("ncclWorkElem", "chunkCount"),  # 2.20: the host cuts the work for each channel; before, the kernel did
)
TYPES = ("i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "f8e4m3", "f8e5m2")
OPERATORS = ("Sum", "Prod", "MinMax", "PreMulSum", "SumPostDiv")
PROTOCOLS = ("LL", "LL128", "Simple")
ALLREDUCE_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree")


class LayoutError(Exception):
    """The library's debug information does not have the shape the stand-in knows."""


@dataclass(frozen=True)
class DeviceFunction:
    """One entry of NCCL's device function table."""

    collective: str
    operator: str
    type: str
    algorithm: str
    protocol: str


def load(library: Path) -> drgn.Program:
    """Load the debug information of a library that no process runs."""
    program = drgn.Program()
    module = program.extra_module(str(library), create=True)
    module.address_range = (0, 1 << 40)
    module.try_file(library, force=True)
    if module.wants_debug_file():
        raise LayoutError(f"{library} carries no debug information; use the libnccl of the wheel nvidia-nccl-cu12")
    return program


def find_struct(program: drgn.Program, name: str) -> drgn.Type | None:
    """The complete structure of that name, or None."""
    try:
        found = program.type(f"struct {name}")
    except LookupError:
        return None
    return found if found.is_complete() else None


def strip(type_: drgn.Type) -> drgn.Type:
    """The type without typedefs."""
    while type_.kind == drgn.TypeKind.TYPEDEF:
        type_ = type_.type
    return type_


def is_aggregate(type_: drgn.Type) -> bool:
    """Whether the type has members."""
    return type_.kind in (drgn.TypeKind.STRUCT, drgn.TypeKind.UNION, drgn.TypeKind.CLASS)


def alignment(type_: drgn.Type) -> int:
    """Alignment in bytes: the largest of the members', or more where the size of a structure can only be explained by alignas."""
    type_ = strip(type_)
    if type_.kind == drgn.TypeKind.ARRAY:
        return alignment(type_.type)
    if not is_aggregate(type_):
        return int(drgn.sizeof(type_))
    members = type_.members or ()
    align = max((alignment(member.type) for member in members), default=1)
    end = max(((member.bit_offset + _bits(member) + 7) // 8 for member in members), default=0)
    while align < 128 and -(-end // align) * align != type_.size:
        align *= 2
    return align


def _bits(member: drgn.TypeMember) -> int:
    return member.bit_field_size or int(drgn.sizeof(member.type)) * 8


class Emitter:
    """Writes C++ definitions that reproduce DWARF structures."""

    def __init__(self, program: drgn.Program) -> None:
        self.program = program
        self.lines: list[str] = []
        self.emitted: set[str] = set()

    def scalar(self, type_: drgn.Type) -> str:
        """A C++ spelling of the same size and kind, for anything that is not an aggregate or an array."""
        type_ = strip(type_)
        if type_.kind == drgn.TypeKind.POINTER:
            target = strip(type_.type)
            if target.kind in (drgn.TypeKind.STRUCT, drgn.TypeKind.CLASS) and target.tag in ROOTS:
                return f"struct {target.tag}*"
            if target.kind == drgn.TypeKind.POINTER:
                return self.scalar(target) + "*"
            if target.kind == drgn.TypeKind.INT:
                return self.scalar(target) + "*"
            return "void*"
        if type_.kind == drgn.TypeKind.ENUM:
            return self.scalar(type_.type)
        if type_.kind == drgn.TypeKind.BOOL:
            return "bool"
        if type_.kind == drgn.TypeKind.FLOAT:
            return "float" if type_.size == 4 else "double"
        if type_.kind == drgn.TypeKind.INT and type_.name in ("char", "signed char") and type_.size == 1:
            return "char"
        signed = type_.kind == drgn.TypeKind.INT and type_.is_signed
        return f"{'' if signed else 'u'}int{type_.size * 8}_t"

    def declarator(self, type_: drgn.Type, name: str) -> str:
        """Declaration of `name` with this type."""
        dimensions = ""
        type_ = strip(type_)
        while type_.kind == drgn.TypeKind.ARRAY:
            dimensions += f"[{type_.length or 0}]"
            type_ = strip(type_.type)
        if is_aggregate(type_):
            kind = "union" if type_.kind == drgn.TypeKind.UNION else "struct"
            if type_.tag:
                self.struct(type_, type_.tag)
                return f"{kind} {type_.tag} {name}{dimensions}"
            return f"{kind} {{ {self.body(type_)} }} {name}{dimensions}"
        return f"{self.scalar(type_)} {name}{dimensions}"

    def body(self, type_: drgn.Type) -> str:
        """Member declarations."""
        parts = []
        end = 0
        for member in type_.members or ():
            text = self.declarator(member.type, member.name or "")
            if member.bit_field_size:
                text += f" : {member.bit_field_size}"
                end = -(-(member.bit_offset + member.bit_field_size) // 8)
            else:
                # alignas() of a member shows only as a gap in front of it (ncclKernelCommAndChannels.channels in 2.30).
                offset = member.bit_offset // 8
                if offset - end >= 8 and offset % 16 == 0 and type_.kind != drgn.TypeKind.UNION:
                    text = "alignas(16) " + text
                size = drgn.sizeof(member.type) if strip(member.type).is_complete() else 0
                end = offset + size
            parts.append(text + ";")
        return " ".join(parts)

    def struct(self, type_: drgn.Type, name: str) -> None:
        """Emit one named structure (and those it contains) with its checks."""
        if name in self.emitted:
            return
        self.emitted.add(name)
        kind = "union" if type_.kind == drgn.TypeKind.UNION else "struct"
        body = self.body(type_)  # emits contained structures first
        # NCCL marks some structures alignas: GCC 8's DWARF does not say so, but the size gives it away.
        align = alignment(type_)
        aligned = f"alignas({align}) " if align > 8 else ""
        self.lines.append(f"{kind} {aligned}{name} {{ {body} }};")
        self.lines.append(f'static_assert(sizeof({kind} {name}) == {type_.size}, "size of {name}");')
        for member in type_.members or ():
            if member.name and not member.bit_field_size:
                offset = member.bit_offset // 8
                self.lines.append(f'static_assert(offsetof({kind} {name}, {member.name}) == {offset}, "{name}.{member.name}");')


def read_symbol(library: Path, wanted: str) -> bytes:
    """The bytes of a data symbol of the file's .symtab."""
    with library.open("rb") as file:
        header = file.read(64)
        (sections_at,) = struct.unpack_from("<Q", header, 40)
        entry_size, count = struct.unpack_from("<HH", header, 58)
        file.seek(sections_at)
        table = file.read(entry_size * count)
        sections = [struct.unpack_from("<IIQQQQIIQQ", table, index * entry_size) for index in range(count)]
        for _, kind, _, _, offset, size, link, _, _, _ in sections:
            if kind != 2:  # SHT_SYMTAB
                continue
            file.seek(offset)
            symbols = file.read(size)
            file.seek(sections[link][4])
            names = file.read(sections[link][5])
            for name_at, _, _, section, value, length in struct.iter_unpack("<IBBHQQ", symbols):
                if names.startswith(wanted.encode() + b"\0", name_at):
                    _, _, _, address, at, _, _, _, _, _ = sections[section]
                    file.seek(at + value - address)
                    return file.read(length)
    raise LayoutError(f"{library} has no symbol {wanted}")


def function_rows(types: int, variant: str) -> list[DeviceFunction]:
    """All rows of ncclDevFuncRowToId in NCCL's order (ncclDevFuncId() in src/include/device.h of the tags named below)."""
    # 2.19: Ring and NVLS; 2.20 and 2.21 add CollNetDirect; 2.23 adds PAT; 2.29 adds AllGatherV.
    gather = {
        "2.19": ("Ring", "NVLS"),
        "2.21": ("Ring", "CollNetDirect", "NVLS"),
        "2.23": ("Ring", "CollNetDirect", "NVLS", "PAT"),
        "2.29": ("Ring", "CollNetDirect", "NVLS", "PAT"),
    }[variant]
    rows = [DeviceFunction("SendRecv", "Sum", "i8", "Ring", "Simple")]
    moving: list[tuple[str, tuple[str, ...]]] = [("AllGather", gather), ("Broadcast", ("Ring",))]
    if variant == "2.29":
        moving.append(("AllGatherV", ("Ring",)))
    rows += [DeviceFunction(name, "Sum", "i8", algo, proto) for name, algos in moving for algo in algos for proto in PROTOCOLS]
    reducing = (("AllReduce", ALLREDUCE_ALGORITHMS), ("Reduce", ("Ring",)), ("ReduceScatter", gather))
    rows += [
        DeviceFunction(name, operator, type_, algo, proto)
        for name, algos in reducing
        for operator in OPERATORS
        for type_ in TYPES[:types]
        for algo in algos
        for proto in PROTOCOLS
    ]
    return rows


def device_functions(library: Path) -> tuple[list[DeviceFunction], bool]:
    """The device function of each id, and whether averages of signed integers share the function of unsigned ones.

    Where they do, the argument of SumPostDiv is no longer just the divisor (src/enqueue.cc, hostToDevRedOp).
    Raises LayoutError when the table has a length that no known enumeration gives.
    """
    raw = read_symbol(library, "ncclDevFuncRowToId")
    ids = [identity for (identity,) in struct.iter_unpack("<i", raw)][:-1]  # the last entry ends the table
    for variant in ("2.19", "2.21", "2.23", "2.29"):
        for types in (10, 12):
            rows = function_rows(types, variant)
            if len(rows) == len(ids):
                # Several rows share a function (signed and unsigned sums); the later row is the unsigned, primary one.
                table = {identity: row for identity, row in zip(ids, rows, strict=True) if identity >= 0}
                missing = DeviceFunction("Nop", "Sum", "i8", "Ring", "Simple")
                average = {row.type: identity for identity, row in zip(ids, rows, strict=True) if _is_average(row)}
                return [table.get(identity, missing) for identity in range(max(table) + 1)], average["i32"] == average["u32"]
    raise LayoutError(f"{library} has {len(ids)} device functions, an enumeration this testbed does not know")


def _is_average(row: DeviceFunction) -> bool:
    return (row.collective, row.operator, row.algorithm, row.protocol) == ("AllReduce", "SumPostDiv", "Ring", "Simple")


def build_id(library: Path) -> str:
    """The GNU build id of the file in hexadecimal, or an empty string."""
    with library.open("rb") as file:
        head = file.read(4096)
    at = head.find(b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0")
    return head[at + 16 : at + 36].hex() if at >= 0 else ""


def enumerators(program: drgn.Program, name: str) -> list[tuple[str, int]]:
    """Names and values of an enumeration, empty when the release does not have it."""
    for spelling in (f"enum {name}", name):
        try:
            found = strip(program.type(spelling))
        except (LookupError, SyntaxError):
            continue
        return [(item.name, item.value) for item in found.enumerators or ()]
    return []


def render(library: Path) -> str:
    """The whole header."""
    program = load(library)
    emitter = Emitter(program)
    flags = []
    for name in ROOTS:
        type_ = find_struct(program, name)
        # In 2.28 and later ncclDevComm is the public device API, not what kernels get.
        skip = name == "ncclDevComm" and find_struct(program, "ncclKernelComm") is not None
        flags.append(f"#define NCCL_HAS_{name} {int(type_ is not None and not skip)}")
        if type_ is not None and not skip:
            emitter.struct(type_, name)
    for owner, member in MEMBERS:
        type_ = find_struct(program, owner)
        names = _all_member_names(type_) if type_ is not None else set()
        flags.append(f"#define NCCL_HAS_{owner}_{member} {int(member in names)}")
    kernel_comm = "ncclKernelComm" if "ncclKernelComm" in emitter.emitted else "ncclDevComm"
    both = kernel_comm + "AndChannels"
    if not {kernel_comm, both, "ncclConnInfo", "ncclDevChannel"} <= emitter.emitted:
        raise LayoutError(f"{library}: the debug information lacks {kernel_comm}, its channels or ncclConnInfo")
    if not {"ncclDevWorkBatch", "ncclWork"} & emitter.emitted:
        raise LayoutError(f"{library}: neither ncclWork (up to 2.21) nor ncclDevWorkBatch (from 2.22): unknown work descriptors")
    lines = [
        "// Generated by gen_layout.py from the debug information of libnccl. Do not edit.",
        "#pragma once",
        "#include <cstddef>",
        "#include <cstdint>",
        *flags,
    ]
    for name in ENUMS:
        lines += [f"constexpr int {item} = {value};" for item, value in enumerators(program, name)]
    lines += [f"struct {name};" for name in ROOTS]
    lines += emitter.lines
    lines += [f"using KernelComm = {kernel_comm};", f"using KernelCommAndChannels = {both};"]
    lines.append(f"constexpr int kStepsPerBuffer = {_steps(program)};  // NCCL_STEPS")
    lines.append(f'constexpr char kBuiltForBuildId[] = "{build_id(library)}";')
    functions, shared = device_functions(library)
    lines.append(f"constexpr bool kSignedAverageIsUnsigned = {str(shared).lower()};")
    lines.append("struct DeviceFunctionName { const char *collective, *reduction, *type, *algorithm, *protocol; };")
    lines.append("constexpr DeviceFunctionName kDeviceFunctions[] = {")
    for function in functions:
        fields = (function.collective, function.operator, function.type, function.algorithm, function.protocol)
        lines.append("  {" + ", ".join(f'"{field}"' for field in fields) + "},")
    lines.append("};")
    return "\n".join(lines) + "\n"


def _all_member_names(type_: drgn.Type) -> set[str]:
    names: set[str] = set()
    for member in type_.members or ():
        if member.name:
            names.add(member.name)
        elif is_aggregate(strip(member.type)):
            names |= _all_member_names(strip(member.type))
    return names


def _steps(program: drgn.Program) -> int:
    """NCCL_STEPS, a macro, is the length of the FIFOs in ncclRecvMem."""
    type_ = find_struct(program, "ncclRecvMem")
    pending = [type_] if type_ is not None else []
    while pending:
        for member in pending.pop().members or ():
            inner = strip(member.type)
            if member.name in ("connFifo", "sizesFifo") and inner.kind == drgn.TypeKind.ARRAY and inner.length:
                return int(inner.length)
            if is_aggregate(inner):
                pending.append(inner)
    raise LayoutError("ncclRecvMem has no FIFO: the number of steps in a connection's buffer is unknown")


def main() -> int:
    """Write the header; 1 and one line on a library that is not understood."""
    library, header = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        text = render(library)
    except LayoutError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1
    header.parent.mkdir(parents=True, exist_ok=True)
    if not header.exists() or header.read_text() != text:
        header.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
