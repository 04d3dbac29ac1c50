"""What `quantkit inspect` says of a file or folder that is no checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from quantkit.cli.console import format_bytes
from quantkit.errors import QuantkitError

Rows = list[dict[str, Any]]

# What an export leaves in a folder when it was to another thing than a checkpoint.
NO_CHECKPOINT = ("model.onnx", "weights.safetensors")
CHECKPOINTS = (".safetensors", ".safetensors.index.json", ".gguf")


def is_checkpoint(path: Path) -> bool:
    """Whether to look at a path as a checkpoint. Raises QuantkitError when nothing reads it."""
    from quantkit.models.shards import is_pickle

    if not path.exists() and not path.is_symlink():
        raise QuantkitError(f"{path} does not exist")
    if path.is_dir() and not path.name.endswith(".safetensors"):
        if (path / "quantkit.json").is_file():
            return (
                not any((path / name).is_file() for name in NO_CHECKPOINT)
                and not (path / "model_index.json").is_file()
            )
        return not (path / "model_index.json").is_file()
    return path.name.endswith(CHECKPOINTS) or is_pickle(path)


def inspect_file(path: Path) -> Rows:
    """Rows about a folder that quantkit wrote, a pipeline, an ONNX file or an engine."""
    from quantkit.models.strict_json import check_regular

    if path.is_dir():
        if any((path / name).is_file() for name in NO_CHECKPOINT):
            return _inspect_artefact(path)
        return _inspect_pipeline(path)
    check_regular(path)
    readers = {".onnx": _inspect_onnx, ".engine": _inspect_engine}
    if path.suffix in readers:
        return readers[path.suffix](path)
    raise QuantkitError(
        f"{path} is of no kind that quantkit reads; known: {', '.join(readers)}, .safetensors, "
        ".gguf, a folder"
    )


def _inspect_pipeline(folder: Path) -> Rows:
    """One row for each component that has weights."""
    from quantkit.models.locate import read_json
    from quantkit.models.quantized import open_quantized

    rows: Rows = []
    for name, entry in read_json(folder / "model_index.json").items():
        if Path(name).name != name or name in (".", ".."):
            raise QuantkitError(f"{folder}: component {name!r} is outside the folder")
        if not any((folder / name).glob("*.safetensors")):
            continue
        quantized = open_quantized(folder / name, strict=False)
        infos = quantized.checkpoint.infos.values()
        layers = sum(math.prod(layer.shape) for layer in quantized.layers.values())
        rows.append(
            {
                "component": name,
                "class": entry[-1] if isinstance(entry, list) and entry else str(entry),
                "layout": quantized.layout,
                "tensors": len(infos),
                "parameters": layers + sum(math.prod(i.shape) for i in quantized.plain.values()),
                "bytes": sum(info.nbytes for info in infos),
            }
        )
    if not rows:
        raise QuantkitError(f"{folder}: no component of this pipeline has .safetensors files")
    return rows


def _inspect_artefact(folder: Path) -> Rows:
    from quantkit.manifest import Manifest

    manifest = Manifest.read(folder)
    return [
        {
            "layer": row["layer"],
            "shape": "x".join(map(str, row["shape"])),
            "weight": row["weight_format"] or "-",
            "input": row["input_format"] or "-",
            "bytes": row["bytes_after"],
            "reason": row["reason"],
        }
        for row in manifest.plan
    ]


def _inspect_onnx(path: Path) -> Rows:
    import onnx

    from quantkit.engines.graph import load_graph

    graph = load_graph(path)
    operators = Counter(node.op_type for node in graph.model.graph.node)
    dtypes: Counter[str] = Counter()
    for tensor in graph.model.graph.initializer:
        dtypes[onnx.TensorProto.DataType.Name(tensor.data_type)] += 1
    rows = [{"what": "operator", "name": name, "count": n} for name, n in operators.most_common()]
    rows += [{"what": "initializer", "name": name, "count": n} for name, n in dtypes.most_common()]
    asked = Counter(layer.scheme for layer in graph.asked)
    return [*rows, *({"what": "layer", "name": name, "count": n} for name, n in asked.items())]


def _inspect_engine(path: Path) -> Rows:
    from quantkit.engines.plan import read_plan

    plan = read_plan(path)
    rows: Rows = [
        {"what": "runtime", "value": plan.runtime_version},
        {"what": "targets", "value": ", ".join(plan.targets)},
        {"what": "device memory", "value": format_bytes(plan.device_memory)},
    ]
    for dtype, size in plan.constants.items():
        rows.append({"what": f"{dtype} constants", "value": format_bytes(size)})
    if plan.problem is not None:
        rows.append({"what": "not understood", "value": plan.problem})
    return rows
