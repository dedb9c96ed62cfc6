"""Write the numpy mirrors of bpftrace_probes/events.h and maps.h, and of kernel_counters/frame.h.

    python scripts/generate_events.py           write model/events.py, probes/map_layouts.py, model/frame_layout.py
    python scripts/generate_events.py --check   status 1 when a committed mirror differs from its header

The headers hold only enumerations, ``#define NAME NUMBER`` and structures of fixed-size integers, in C that this small parser
knows; anything else in them is an error, not ignored.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ROOT / "bpftrace_probes"
EVENTS = ROOT / "src/ncclwatch/model/events.py"
MAPS = ROOT / "src/ncclwatch/probes/map_layouts.py"
FRAME_HEADER = ROOT / "kernel_counters/frame.h"
FRAME = ROOT / "src/ncclwatch/model/frame_layout.py"
LINE_LENGTH = 130

SCALARS = {
    "__u8": ("u1", 1),
    "__u16": ("<u2", 2),
    "__u32": ("<u4", 4),
    "__u64": ("<u8", 8),
    "__s32": ("<i4", 4),
    "__s64": ("<i8", 8),
}


class HeaderError(ValueError):
    """The header holds something that cannot be mirrored."""


@dataclass(frozen=True)
class Field:
    """A member: ``type`` is a scalar's C name or a structure's; ``length`` is 0 for what is no array."""

    name: str
    type: str
    length: int
    offset: int
    comment: str


@dataclass
class Struct:
    name: str
    fields: list[Field] = field(default_factory=list)
    size: int = 0
    alignment: int = 1


@dataclass
class Header:
    constants: dict[str, int] = field(default_factory=dict)
    enums: dict[str, list[tuple[str, int, str]]] = field(default_factory=dict)
    structs: dict[str, Struct] = field(default_factory=dict)


def parse(text: str) -> Header:
    """Parse one header; raises :class:`HeaderError` with the offending line."""
    header = Header()
    lines = _significant_lines(text)
    for line, _ in lines:
        if match := re.fullmatch(r"#define (\w+) (\d+)", line):
            header.constants[match[1]] = int(match[2])
        elif match := re.fullmatch(r"enum (\w+) \{", line):
            header.enums[match[1]] = _parse_enum(lines)
        elif match := re.fullmatch(r"struct (\w+) \{", line):
            header.structs[match[1]] = _parse_struct(match[1], lines, header)
        elif not re.fullmatch(r"#(ifndef|define|endif)( \w+)?", line):
            raise HeaderError(f"cannot mirror: {line}")
    for enum in header.enums.values():
        header.constants.update({name: value for name, value, _ in enum})
    return header


def _significant_lines(text: str) -> Iterator[tuple[str, str]]:
    """(code, comment at its end) of each line that has code."""
    text = re.sub(
        r"/\*(.*?)\*/",
        lambda m: "/*" + " ".join(re.sub(r"^\s*\*+", " ", m[1], flags=re.MULTILINE).split()) + "*/",
        text,
        flags=re.DOTALL,
    )
    for line in text.splitlines():
        comment = " ".join(re.findall(r"/\*(.*?)\*/", line))
        code = re.sub(r"/\*.*?\*/", "", line).strip()
        if code:
            yield code, comment


def _parse_enum(lines: Iterator[tuple[str, str]]) -> list[tuple[str, int, str]]:
    values: list[tuple[str, int, str]] = []
    for line, comment in lines:
        if line == "};":
            return values
        match = re.fullmatch(r"(\w+) = (\d+),", line)
        if not match:
            raise HeaderError(f"cannot mirror enumerator: {line}")
        values.append((match[1], int(match[2]), comment))
    raise HeaderError("enumeration without end")


def _parse_struct(name: str, lines: Iterator[tuple[str, str]], header: Header) -> Struct:
    struct = Struct(name)
    for line, comment in lines:
        if line == "};":
            if struct.size % struct.alignment:
                raise HeaderError(f"struct {name} ends with implicit padding")
            return struct
        match = re.fullmatch(r"(?:struct )?(\w+) (\w+)(?:\[(\w+)\])?;", line)
        if not match:
            raise HeaderError(f"cannot mirror member: {line}")
        kind, member, length = match[1], match[2], match[3]
        if kind in SCALARS:
            size = alignment = SCALARS[kind][1]
        elif kind in header.structs:
            size, alignment = header.structs[kind].size, header.structs[kind].alignment
        else:
            raise HeaderError(f"unknown type in: {line}")
        if struct.size % alignment:
            raise HeaderError(f"implicit padding before {name}.{member}")
        count = 0 if length is None else int(length) if length.isdigit() else _constant(header, length)
        struct.fields.append(Field(member, kind, count, struct.size, comment))
        struct.size += size * (count or 1)
        struct.alignment = max(struct.alignment, alignment)
    raise HeaderError(f"struct {name} without end")


def _constant(header: Header, name: str) -> int:
    for enum in header.enums.values():
        for enumerator, value, _ in enum:
            if enumerator == name:
                return value
    if name not in header.constants:
        raise HeaderError(f"unknown constant {name}")
    return header.constants[name]


def render(header: Header, source: str, summary: str) -> str:
    """The mirror module."""
    out = [
        f'"""{summary}',
        "",
        f"Generated from {source} by scripts/generate_events.py: change the header, then run the script.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
    ]
    if header.enums:
        out.append("from enum import IntEnum, IntFlag" if "nw_flag" in header.enums else "from enum import IntEnum")
        out.append("")
    out += ["import numpy as np", ""]
    for name, value in header.constants.items():
        if not any(name == enumerator for enum in header.enums.values() for enumerator, _, _ in enum):
            out.append(f"{_strip(name)} = {value}")
    for name, values in header.enums.items():
        prefix = _common_prefix([enumerator for enumerator, _, _ in values])
        base = "IntFlag" if name == "nw_flag" else "IntEnum"
        out += ["", "", f"class {_camel(name)}({base}):", f'    """``enum {name}`` of {Path(source).name}."""', ""]
        for enumerator, value, comment in values:
            out.append(f"    {_strip(enumerator.removeprefix(prefix))} = {value}")
            if comment:
                out.append(f'    """{_sentence(comment)}"""')
    for struct in header.structs.values():
        constant = f"{_strip(struct.name).upper()}_DTYPE"
        out += ["", "", f"{constant} = np.dtype("]
        out += ["    {", '        "names": [']
        out += [f'            "{f.name}",' + (f"  # {f.comment}" if f.comment else "") for f in struct.fields]
        out += ["        ],", '        "formats": [']
        for f in struct.fields:
            kind = f'"{SCALARS[f.type][0]}"' if f.type in SCALARS else f"{_strip(f.type).upper()}_DTYPE"
            out.append(f"            ({kind}, ({f.length},))," if f.length else f"            {kind},")
        out += ["        ],", *_offsets(struct), f'        "itemsize": {struct.size},', "    }", ")"]
        out.append(f'"""``struct {struct.name}``, {struct.size} bytes."""')
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(out)) + "\n"


def _offsets(struct: Struct) -> list[str]:
    line = f'        "offsets": [{", ".join(str(f.offset) for f in struct.fields)}],'
    if len(line) <= LINE_LENGTH:
        return [line]
    return ['        "offsets": [', *(f"            {f.offset}," for f in struct.fields), "        ],"]


def _strip(name: str) -> str:
    return re.sub(r"^(nw|NW)_", "", name)


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in _strip(name).split("_"))


def _sentence(comment: str) -> str:
    return comment[0].upper() + comment[1:] + ("" if comment.endswith((".", "?", ")")) else ".")


def _common_prefix(names: list[str]) -> str:
    """``NW_COUNT_`` of a list of enumerators; only the last one, a total such as ``NW_COUNTERS``, may lack it."""
    prefix = names[0][: names[0].index("_", 3) + 1]
    if any(not name.startswith(prefix) for name in names[:-1]):
        raise HeaderError(f"enumerators do not share the prefix {prefix}")
    return prefix


def mirrors() -> dict[Path, str]:
    """Every mirror: where it lies and what it must hold."""
    events = parse((HEADERS / "events.h").read_text("utf-8"))
    maps = parse((HEADERS / "maps.h").read_text("utf-8"))
    frame = parse(FRAME_HEADER.read_text("utf-8"))
    return {
        EVENTS: render(
            events, "bpftrace_probes/events.h", "Records of the calls plane: the binary layout the BPF programs write."
        ),
        MAPS: render(maps, "bpftrace_probes/maps.h", "Layout of the BPF maps by which the agent steers its programs."),
        FRAME: render(frame, "kernel_counters/frame.h", "The probing frame: the binary layout that the counter shim publishes."),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    status = 0
    for path, text in mirrors().items():
        current = path.read_text("utf-8") if path.exists() else ""
        if current == text:
            continue
        if check:
            print(f"{path.relative_to(ROOT)} differs from its header: run scripts/generate_events.py", file=sys.stderr)
            status = 1
        else:
            path.write_text(text, "utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
