"""ONNX in, engine out, through one builder for TensorRT and TensorRT-RTX.

What can be known before the compiler runs is checked before it runs, cheapest first: the target
holds the format, the weights are there, the output types are those declared. A compilation takes
minutes and writes gigabytes, so it reports progress, can be interrupted, goes to a `.part` file
that is renamed when complete, and is skipped only when a hash over everything that went into it
says so. Calling polygraphy or trtexec was refused: neither reports why a layer was rejected, and
the latter needs a GPU.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from quantkit import manifest
from quantkit.engines import tensorrt, tensorrt_rtx
from quantkit.engines.compiler import Refusal, RefusedError, compile_engine
from quantkit.engines.external import check_external_data, external_files
from quantkit.engines.graph import FP4, FP8, AskedLayer, Graph, load_graph, tensors
from quantkit.engines.lint import Finding, lint_graph
from quantkit.engines.lint_rules import RULES
from quantkit.engines.runtime import Runtime
from quantkit.engines.shapes import Extents, Profile, ShapeRange, check_profile, is_dynamic
from quantkit.errors import QuantkitError

RUNTIMES: dict[str, Runtime] = {
    "tensorrt-rtx": tensorrt_rtx.RUNTIME,
    "tensorrt": tensorrt.RUNTIME,
}

Progress = Callable[[int, int], None]
"""Called with (done, total) as work goes on."""

_LONGEST_QUOTE = 300


@dataclass(frozen=True, slots=True)
class BuildResult:
    """An engine and what made it; the content of build.json.

    engine: file name. seconds: of compilation. key: SHA-256 over the ONNX file, its external data,
    the options and the runtime's version. emulated: layers that compute in high precision because
    the target has no kernel for their format. reused: the engine was already there, key and bytes
    unchanged.
    """

    runtime: str
    version: str
    targets: tuple[str, ...]
    engine: str
    bytes: int
    seconds: float
    sha256: str
    key: str
    profiles: tuple[dict[str, dict[str, list[int]]], ...] = ()
    warnings: tuple[str, ...] = ()
    emulated: tuple[str, ...] = ()
    reused: bool = False

    def to_json(self) -> dict[str, Any]:
        """The content of build.json."""
        return asdict(self)


def build(
    onnx_path: Path | str,
    output: Path | str | None = None,
    *,
    runtime: str = "tensorrt-rtx",
    targets: Sequence[str] = ("sm120",),
    shapes: Sequence[Profile] = (),
    allow_emulated: bool = False,
    progress: Progress | None = None,
) -> BuildResult:
    """Compile an ONNX file to an engine and write build.json beside the ONNX file.

    output: the engine file; `<model>.<targets>.engine` beside the ONNX file when None. runtime: a
    row of RUNTIMES. shapes: optimization profiles, each input name -> ShapeRange; needed for
    dynamic inputs unless quantkit.json in the model's folder records shapes. allow_emulated: build
    even if a format computes in high precision on the target. progress: called with (done, total).

    The engine is deterministic, and is not compiled again when its key and bytes are those that
    build.json records. Raises QuantkitError, naming the layer where there is one.
    KeyboardInterrupt stops the compiler and leaves nothing behind.
    """
    path = Path(onnx_path)
    compiler = _runtime(runtime)
    graph = load_graph(path)
    check_targets(compiler, targets, graph, path)
    emulated = _emulated_layers(compiler, targets, graph)
    if emulated and not allow_emulated:
        raise QuantkitError(_emulation(emulated, targets, path))
    check_external_data(graph.model, path)
    findings = lint_graph(graph, path)
    for finding in findings:
        if finding.law.effect == "wrong":
            raise QuantkitError(f"{path}: {finding}")
    profiles, notes = _profiles(graph, path, shapes)
    trt = compiler.load()
    engine = Path(output) if output is not None else _engine_path(path, targets)
    if engine.is_dir():
        raise QuantkitError(f"output {engine} is a folder; name the engine file to write")
    key = _key(graph, path, compiler, trt.__version__, targets, profiles)
    record = path.parent / "build.json"
    known = _reusable(record, engine, key)
    if known is not None:
        return known
    part = engine.with_name(f".{engine.name}.{os.getpid()}.part")
    start = time.monotonic()
    try:
        said = compile_engine(
            compiler, trt, path, part,
            targets=targets,
            profiles=profiles,
            output_types={o.name: o.type.tensor_type.elem_type for o in graph.model.graph.output},
            progress=progress,
        )  # fmt: skip
        result = BuildResult(
            runtime=runtime,
            version=trt.__version__,
            targets=tuple(targets),
            engine=os.path.relpath(engine, path.parent),
            bytes=part.stat().st_size,
            seconds=round(time.monotonic() - start, 2),
            sha256=_sha256(part),
            key=key,
            profiles=tuple({n: s.to_json() for n, s in p.items()} for p in profiles if p),
            warnings=(*notes, *_warnings(findings), *dict.fromkeys(said)),
            emulated=tuple(layer.layer for layer in emulated),
        )
        part.replace(engine)
    except RefusedError as refused:
        reason = _explain(refused.refusals[0], findings, f"{compiler.name} {trt.__version__}")
        raise QuantkitError(f"{path}: {reason}") from None
    finally:
        part.unlink(missing_ok=True)
    manifest.write_json(record, result.to_json())
    return result


def _runtime(name: str) -> Runtime:
    if name not in RUNTIMES:
        raise QuantkitError(f"unknown runtime {name!r}; known: {', '.join(RUNTIMES)}")
    return RUNTIMES[name]


def check_targets(runtime: Runtime, targets: Sequence[str], graph: Graph, path: Path) -> None:
    """Raise QuantkitError when a target does not exist or cannot hold the model's formats.

    From a table, so that nobody finds out after an hour of compiling.
    """
    if not targets:
        raise QuantkitError(f"no target given; known: {', '.join(runtime.targets)}")
    stored = {tensor.data_type for tensor in tensors(graph.model)}
    made = {node.op_type for node in graph.nodes}
    needed = {
        "fp4": FP4 in stored or "TRT_FP4DynamicQuantize" in made,
        "fp8": FP8 in stored or "TRT_FP8QuantizeLinear" in made,
    }
    for target in targets:
        if target in runtime.elsewhere:
            raise QuantkitError(f"target {target}: {runtime.elsewhere[target]}")
        if target not in runtime.targets:
            near = difflib.get_close_matches(target, runtime.targets, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise QuantkitError(
                f"unknown target {target!r}; {hint}{runtime.name} compiles for "
                f"{', '.join(runtime.targets)}"
            )
        for kind, wanted in needed.items():
            if wanted and kind not in runtime.targets[target].holds:
                able = [name for name, row in runtime.targets.items() if kind in row.holds]
                raise QuantkitError(
                    f"{path}: {kind.upper()} needs {', '.join(able)}; you ask for {target}: "
                    f"{_instead(kind, runtime, target)}"
                )


def _instead(kind: str, runtime: Runtime, target: str) -> str:
    if kind == "fp4" and "fp8" in runtime.targets[target].holds:
        return "export with --fp8, or only export and build for another GPU"
    return "export without quantization, or only export and build for another GPU"


def _emulated_layers(runtime: Runtime, targets: Sequence[str], graph: Graph) -> list[AskedLayer]:
    """Layers that one of the targets has no low-precision kernel for."""
    schemes = frozenset().union(*(runtime.targets[target].emulated for target in targets))
    return [layer for layer in graph.asked if layer.scheme in schemes]


def _emulation(layers: Sequence[AskedLayer], targets: Sequence[str], path: Path) -> str:
    schemes = ", ".join(sorted({layer.scheme for layer in layers}))
    return (
        f"{path}: {schemes} is only emulated on {', '.join(targets)}: {len(layers)} layers "
        f"({layers[0].layer!r} first) would be stored narrow but compute in high precision; "
        "use the recipe nvfp4 or fp8, or pass --allow-emulated"
    )


def _profiles(
    graph: Graph, path: Path, shapes: Sequence[Profile]
) -> tuple[list[dict[str, ShapeRange]], list[str]]:
    """Complete profiles, and a note where shapes were taken from quantkit.json."""
    initializers = {tensor.name for tensor in graph.model.graph.initializer}
    inputs = {
        info.name: _extents(info)
        for info in graph.model.graph.input
        if info.name not in initializers
    }
    recorded = _recorded_shapes(path, inputs)
    profiles, notes = [], []
    for profile in shapes or [{}]:
        profiles.append(check_profile({**recorded, **profile}, inputs))
        fixed = [n for n, s in recorded.items() if n not in profile and s.min == s.max]
        if fixed:
            notes.append(
                f"no --shape for {', '.join(fixed)}: the engine takes only the shapes the model "
                "was exported with; give a range for others"
            )
    return profiles, notes


def _extents(info: Any) -> Extents:
    return [
        dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None)
        for dim in info.type.tensor_type.shape.dim
    ]


def _recorded_shapes(path: Path, inputs: Mapping[str, Extents]) -> dict[str, ShapeRange]:
    """Shapes of dynamic inputs in the manifest: a row's "min", "opt", "max", or its "example"."""
    file = path.parent / manifest.FILE
    if not file.is_file():
        return {}
    rows = manifest.read_json(file).get("export", {}).get("inputs", [])
    found = {}
    for row in rows:
        name, opt = row.get("name"), row.get("opt", row.get("example"))
        if opt is None or name not in inputs or not is_dynamic(inputs[name]):
            continue
        low, high = row.get("min", opt), row.get("max", opt)
        found[name] = ShapeRange(tuple(low), tuple(opt), tuple(high))
    return found


def _engine_path(path: Path, targets: Sequence[str]) -> Path:
    return path.with_name(f"{path.stem}.{'-'.join(targets)}.engine")


def _key(
    graph: Graph,
    path: Path,
    runtime: Runtime,
    version: str,
    targets: Sequence[str],
    profiles: Sequence[Profile],
) -> str:
    options = {
        "runtime": runtime.name,
        "version": version,
        "targets": list(targets),
        "profiles": [{n: s.to_json() for n, s in sorted(p.items())} for p in profiles],
    }
    files = external_files(graph.model, path.parent)
    return manifest.content_key(path, *files, json.dumps(options, sort_keys=True))


def _reusable(record: Path, engine: Path, key: str) -> BuildResult | None:
    """The recorded build when it made exactly this engine of exactly these inputs."""
    if not record.is_file() or not engine.is_file():
        return None
    row = manifest.read_json(record)
    same = (
        isinstance(row, dict)
        and row.keys() == {field.name for field in fields(BuildResult)}
        and row.get("key") == key
        and row.get("engine") == os.path.relpath(engine, record.parent)
        and row.get("bytes") == engine.stat().st_size
        and row.get("sha256") == _sha256(engine)
    )
    if not same:
        return None
    for name in ("targets", "profiles", "warnings", "emulated"):
        row[name] = tuple(row[name])
    return replace(BuildResult(**row), reused=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _warnings(findings: Sequence[Finding]) -> list[str]:
    """One line per rule, however many layers break it."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.rule, []).append(finding)
    return [
        str(first)
        if not others
        else f"{1 + len(others)} layers ({first.layer!r} first): {first.law.sentence}; {first.fix}"
        for first, *others in groups.values()
    ]


def _explain(refusal: Refusal, findings: Sequence[Finding], compiler: str) -> str:
    """One line: the layer, what is wrong, what to do, and the compiler's own words.

    The lint finding that those words confirm says it best; else the rule that they match; else
    a finding of something that the compiler refuses, since not every refusal has words.
    """
    words = f"{compiler} says: {refusal.sentence[:_LONGEST_QUOTE]}"
    fixes = [rule.fix for rule in RULES.values() if rule.says and rule.says in refusal.sentence]
    confirmed = [f for f in findings if f.law.says and f.law.says in refusal.sentence]
    silent = [f for f in findings if f.law.effect == "rejected"] if not fixes else []
    for finding in (*confirmed, *silent):
        return f"{finding} ({words})"
    layer = f"layer {refusal.layer!r}" if refusal.layer else "the model"
    operator = f" ({refusal.operator})" if refusal.operator else ""
    advice = fixes[0] if fixes else "quantkit knows no fix, please report it with this line"
    return f"{layer}{operator} is refused; {advice} ({words})"
