"""What a compiled TensorRT-RTX engine runs, read from the file: no GPU, no driver, no TensorRT.

Every engine embeds the programs of its compiler (Myelin) as plain text: tensor descriptors with
their types, then one line per kernel with its operands and the ONNX nodes it stands for. The
official inspector shows less and has to deserialize the engine, which needs the GPU.

The text is undocumented. What is relied on is small and checked: the frame around each program
(magic, length, text), its version number, and the fields named below. An engine that this file
does not understand gives a Plan that says so (`problem`), never a guess.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.errors import QuantkitError

# Version numbers of the program text, as TensorRT-RTX 1.7 writes them.
MAIN_PROGRAM = 5
FUSED_PROGRAM = 4

_MAGIC = b"vtrt"
_HEADER_SIZE = 64
_PROGRAM_START = b"header {\n  version = "
# Each program follows this frame: magic, compiler build, length of the text in bytes.
_FRAME = struct.Struct("<4s4xQ")
_FRAME_MAGIC = b"NLYM"

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_RECORD = re.compile(r"^\s*(\w+)\s*=\s*\{(.*)\}\s*$")
_FIELD = re.compile(rf'(\w+)\s*=\s*({_QUOTED}|\{{(?:{_QUOTED}|[^"{{}}])*\}}|[^\s}}]+)')
_ITEM = re.compile(rf'{_QUOTED}|[^\s"{{}}]+')
_ESCAPE = re.compile(r"\\(.)")
_PROFILE = re.compile(r" \[profile (\d+)\]")
_LAYER_PREFIX = "[ONNX Layer: "


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of a program. `dtype` as Myelin spells it: fp4_e2m1, fp8_e4m3, bf16, half, float.

    constant_bytes: size of the payload stored in the engine; 0 for what is computed at run time.
    """

    name: str
    dtype: str
    constant_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel, or one operation inside a fused kernel.

    kind: "fully_connected", "corrltn" (convolution), "runtime_fusion", "function" and others.
    layers: the ONNX nodes that went into it, by name, as the parser recorded them.
    fused: the program that a fused kernel executes, None for any other kernel.
    """

    kind: str
    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    layers: tuple[str, ...]
    fused: Program | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """One compiled subgraph for one optimization profile.

    targets: GPU architectures it was compiled for ("sm120"). profile: optimization profile.
    device_memory: bytes of activations and scratch space on the GPU, weights excluded.
    """

    targets: tuple[str, ...]
    profile: int
    ops: tuple[Op, ...]
    constants: Mapping[str, int]
    device_memory: int


@dataclass(frozen=True, slots=True)
class Plan:
    """An engine file. `problem` says why `programs` is empty; None when the engine was read."""

    runtime_version: str
    programs: tuple[Program, ...]
    problem: str | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        """GPU architectures the engine was compiled for, sorted."""
        return tuple(sorted({target for program in self.programs for target in program.targets}))

    @property
    def constants(self) -> dict[str, int]:
        """Weight bytes per dtype, of the optimization profile that holds most.

        Profiles share weights whose layout agrees, so adding them up would count those twice.
        """
        largest: dict[str, int] = {}
        for programs in self._profiles():
            total: dict[str, int] = {}
            for program in programs:
                for dtype, size in program.constants.items():
                    total[dtype] = total.get(dtype, 0) + size
            if sum(total.values()) > sum(largest.values()):
                largest = total
        return dict(sorted(largest.items()))

    @property
    def device_memory(self) -> int:
        """Bytes of activations and scratch space: the largest subgraph, as they run in turn."""
        return max((program.device_memory for program in self.programs), default=0)

    def _profiles(self) -> Iterator[list[Program]]:
        for profile in sorted({program.profile for program in self.programs}):
            yield [program for program in self.programs if program.profile == profile]


def read_plan(path: Path) -> Plan:
    """Read the engine at `path`; the file is mapped, not loaded.

    Raises QuantkitError for a file that is missing, cut short or no TensorRT-RTX engine. An
    engine of a version whose text is unknown is not an error: `Plan.problem` says it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            version = _read_header(path, file.read(_HEADER_SIZE), size)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                texts, problem = _read_texts(data)
    except OSError as error:
        raise QuantkitError(f"{path}: cannot read the engine: {error.strerror}") from None
    if problem is None and not texts:
        problem = "it embeds no program text"
    if problem is not None:
        return Plan(version, (), f"TensorRT-RTX {version} engine {path.name}: {problem}")
    try:
        return Plan(version, tuple(_link_programs(texts)))
    except KeyError as field:
        problem = f"a record of its program text has no {field} field"
        return Plan(version, (), f"TensorRT-RTX {version} engine {path.name}: {problem}")


def _read_header(path: Path, header: bytes, size: int) -> str:
    """Version of the runtime that an engine belongs to, such as "1.7.1"."""
    if not header.startswith(_MAGIC):
        raise QuantkitError(
            f"{path}: not a TensorRT-RTX engine (it starts with {header[:4]!r}, not {_MAGIC!r}); "
            "give the .engine file that quantkit build wrote"
        )
    declared = int.from_bytes(header[16:24], "little") if len(header) == _HEADER_SIZE else None
    if declared != size:
        raise QuantkitError(
            f"{path}: the engine is damaged: {size} bytes on disk, "
            f"{declared if declared is not None else 'at least 64'} according to its header; "
            "build it again"
        )
    return ".".join(str(part) for part in header[24:27])


def _read_texts(data: mmap.mmap) -> tuple[list[tuple[int, str]], str | None]:
    """(version, text) of every embedded program in file order, and what stood in the way."""
    texts: list[tuple[int, str]] = []
    start = data.find(_PROGRAM_START)
    while start >= 0:
        magic, length = _FRAME.unpack_from(data, start - _FRAME.size)
        if magic != _FRAME_MAGIC or start + length > len(data):
            return [], "its programs are framed in a way that quantkit does not know"
        text = data[start : start + length].decode("utf-8", "replace")
        version = int(text[len(_PROGRAM_START) :].split("\n", 1)[0])
        if version not in (MAIN_PROGRAM, FUSED_PROGRAM):
            known = f"{FUSED_PROGRAM} and {MAIN_PROGRAM}"
            return [], f"program text version {version} is unknown to quantkit (it reads {known})"
        texts.append((version, text))
        start = data.find(_PROGRAM_START, start + length)
    return texts, None


def _link_programs(texts: Sequence[tuple[int, str]]) -> Iterator[Program]:
    """Main programs, each followed in the file by the programs of its fused kernels."""
    mains = [i for i, (version, _) in enumerate(texts) if version == MAIN_PROGRAM]
    for first, last in zip(mains, [*mains[1:], len(texts)], strict=True):
        fused = [_parse_program(text, []) for _, text in texts[first + 1 : last]]
        yield _parse_program(texts[first][1], fused)


@dataclass(slots=True)
class _Sections:
    """Records of one program text by section, in order."""

    regions: list[dict[str, str]] = field(default_factory=list)
    tensors: list[dict[str, str]] = field(default_factory=list)
    ops: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    accelerators: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()


def _split_sections(text: str) -> _Sections:
    sections, current = _Sections(), ""
    for line in text.splitlines():
        if line.endswith(" {"):
            current = line[:-2].strip()
            continue
        record = _RECORD.match(line)
        if record is None:
            continue
        kind, body = record.groups()
        if current == "main":
            sections.ops.append((kind, dict(_FIELD.findall(body))))
        elif current == "descriptors" and kind.endswith("tensor"):
            sections.tensors.append(dict(_FIELD.findall(body)))
        elif kind == "region":
            sections.regions.append(dict(_FIELD.findall(body)))
        elif kind == "accelerators":
            sections.accelerators = _items(body)
        elif kind == "inputs":
            sections.inputs = _items(body)
    return sections


def _parse_program(text: str, fused: Sequence[Program]) -> Program:
    sections = _split_sections(text)
    tensors = {}
    for record in sections.tensors:
        name = _unquote(record["name"])
        size = int(record.get("const_payload_size", 0))
        tensors[name] = Tensor(name, record["type"], size)
    constants: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.constant_bytes:
            constants[tensor.dtype] = constants.get(tensor.dtype, 0) + tensor.constant_bytes
    profiles = {int(n) for name in sections.inputs for n in _PROFILE.findall(name)}
    return Program(
        targets=sections.accelerators,
        profile=max(profiles, default=0),
        ops=tuple(_parse_op(kind, record, tensors, fused) for kind, record in sections.ops),
        constants=constants,
        device_memory=sum(
            int(region["size"])
            for region in sections.regions
            if region.get("place") == "accelerator" and "constant" not in region
        ),
    )


def _parse_op(
    kind: str, record: Mapping[str, str], tensors: Mapping[str, Tensor], fused: Sequence[Program]
) -> Op:
    def resolve(*fields: str) -> tuple[Tensor, ...]:
        listed = next((record[name] for name in fields if name in record), "")
        return tuple(tensors.get(name, Tensor(name, "unknown")) for name in _items(listed))

    program = None
    if kind.startswith("runtime_") and int(record.get("binary", -1)) in range(len(fused)):
        program = fused[int(record["binary"])]
    return Op(
        kind=kind,
        name=_PROFILE.sub("", _unquote(record.get("name", ""))),
        inputs=resolve("input", "input_args"),
        outputs=resolve("output", "output_args"),
        layers=_layers(_unquote(record.get("layers", ""))),
        fused=program,
    )


def _layers(text: str) -> tuple[str, ...]:
    """Names in "[ONNX Layer: a]", a unit separator, "[ONNX Layer: b[0]]"."""
    parts = (part for part in text.split("\x1f") if part.startswith(_LAYER_PREFIX))
    return tuple(part.removeprefix(_LAYER_PREFIX).removesuffix("]") for part in parts)


def _items(listed: str) -> tuple[str, ...]:
    return tuple(_unquote(item) for item in _ITEM.findall(listed.strip("{}")))


def _unquote(text: str) -> str:
    return _ESCAPE.sub(r"\1", text[1:-1]) if text.startswith('"') else text
