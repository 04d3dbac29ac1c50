"""quantkit inspect: what is in this file, and what names there are to choose from."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli import options as opt
from quantkit.cli.console import Console, format_bytes, format_table
from quantkit.errors import QuantkitError


def inspect(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="A folder that quantkit wrote, .onnx, .engine, .safetensors, or a model folder.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        bool,
        typer.Option("--layers", help="List a model's layers by what recipes can match."),
    ] = False,
    recipes: Annotated[bool, typer.Option("--recipes", help="List the built-in recipes.")] = False,
    formats: Annotated[bool, typer.Option("--formats", help="List the number formats.")] = False,
    algorithms: Annotated[
        bool, typer.Option("--algorithms", help="List the ways to quantize a weight.")
    ] = False,
    targets: Annotated[bool, typer.Option("--targets", help="List what can be written.")] = False,
    runtimes: Annotated[
        bool, typer.Option("--runtimes", help="List the engines' compilers and what they hold.")
    ] = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Show what a file holds, or list choices.

    A file or folder: its layers, tensors, operators or constants. With --layers, FILE is a MODEL
    as `quantkit export` takes it. The other options list what can be named elsewhere.
    """
    console = Console(json=json, verbosity=verbose - quiet)
    lists = {
        "recipes": (recipes, _recipes),
        "formats": (formats, _formats),
        "algorithms": (algorithms, _algorithms),
        "targets": (targets, _targets),
        "runtimes": (runtimes, _runtimes),
    }
    chosen = {name: make() for name, (asked, make) in lists.items() if asked}
    if layers:
        if file is None:
            raise QuantkitError("--layers needs a model: quantkit inspect MODEL --layers")
        with console.progress("Reading the model"):
            chosen["layers"] = _layers(file)
    elif file is not None:
        chosen["content"] = _inspect_file(Path(file))
    if not chosen:
        raise QuantkitError("name a file, or one of --layers, --" + ", --".join(lists))
    console.result(chosen, "\n\n".join(_as_text(rows) for rows in chosen.values()))
    console.next("quantkit", *_next(file, layers))


Rows = list[dict[str, Any]]


def _as_text(rows: Rows) -> str:
    """A table; of a description only the first sentence, --json has the rest."""
    if not rows:
        return "nothing in it"
    header = tuple(rows[0])
    return format_table(header, [tuple(_cell(key, row[key]) for key in header) for row in rows])


def _cell(key: str, value: object) -> str:
    return str(value).partition(". ")[0] if key == "description" else str(value)


def _next(file: str | None, layers: bool) -> tuple[str | Path, ...]:
    """What one does with what was shown."""
    if file is None:
        return "inspect", "MODEL", "--layers"
    path = Path(file)
    if (path / "model.onnx").is_file():
        return "verify", path
    if (path / "quantkit.json").is_file():
        return "export", path, "-o", "OUT"
    if path.suffix == ".onnx":
        return "lint", path
    if path.suffix == ".engine":
        return "audit", path.parent
    model = path.parent if path.is_file() and path.suffix != ".py" else file
    return "export", "--fp4", model, "--dry-run"


def _layers(model: str) -> Rows:
    from quantkit.models.source import open_model
    from quantkit.models.trace import trace

    return [
        {
            "layer": layer.name,
            "type": layer.type,
            "op": layer.op,
            "shape": "x".join(map(str, layer.shape)),
            "body": {True: "yes", False: "no", None: "-"}[layer.body],
            "edge": layer.edge or "-",
            "per token": "yes" if layer.per_token else "no",
            "tied": ", ".join(layer.tied) or "-",
        }
        for layer in trace(open_model(model)).layers
    ]


def _recipes() -> Rows:
    from quantkit.recipes.loader import builtin_recipes, load_recipe

    loaded = [load_recipe(name) for name in builtin_recipes()]
    return [{"recipe": recipe.name, "description": recipe.description} for recipe in loaded]


def _formats() -> Rows:
    from quantkit.numerics.formats import FORMATS

    return [
        {
            "format": fmt.name,
            "element": fmt.element.name,
            "block": "x".join("all" if size is None else str(size) for size in fmt.block),
            "block scale": fmt.scale.name,
            "tensor scale": "float32" if fmt.tensor_scale else "-",
        }
        for fmt in FORMATS.values()
    ]


def _algorithms() -> Rows:
    from quantkit.algorithms import ALGORITHMS

    return [
        {"algorithm": name, "needs": ", ".join(sorted(row.needs)) or "weights only"}
        for name, row in ALGORITHMS.items()
    ]


def _targets() -> Rows:
    from quantkit.export.onnx import DIALECTS
    from quantkit.export.run import TARGETS

    commands = {"quantkit": "quantkit quantize"}
    dialects = {"onnx": ", ".join(DIALECTS)}
    return [
        {
            "target": name,
            "command": commands.get(name, f"quantkit export --to {name}"),
            "dialects": dialects.get(name, "-"),
        }
        for name in TARGETS
    ]


def _runtimes() -> Rows:
    from quantkit.engines.build import RUNTIMES

    return [
        {"runtime": name, "target": target, "holds": ", ".join(sorted(holds.holds)) or "-"}
        for name, runtime in RUNTIMES.items()
        for target, holds in runtime.targets.items()
    ]


def _inspect_file(path: Path) -> Rows:
    if not path.exists():
        raise QuantkitError(f"{path} does not exist")
    if path.is_dir():
        if (path / "quantkit.json").is_file():
            return _inspect_artefact(path)
        if (path / "model_index.json").is_file():
            return _inspect_pipeline(path)
        return _inspect_checkpoint(path)
    readers = {
        ".onnx": _inspect_onnx,
        ".engine": _inspect_engine,
        ".safetensors": _inspect_checkpoint,
    }
    if path.suffix in readers:
        return readers[path.suffix](path)
    if path.name.endswith(".safetensors.index.json"):
        return _inspect_checkpoint(path)
    raise QuantkitError(
        f"{path} is of no kind that quantkit reads; known: {', '.join(readers)}, a folder"
    )


def _inspect_pipeline(folder: Path) -> Rows:
    """One row for each component that has weights."""
    from quantkit.models.checkpoint import Checkpoint
    from quantkit.models.source import read_json

    rows: Rows = []
    for name, entry in read_json(folder / "model_index.json").items():
        if not any((folder / name).glob("*.safetensors")):
            continue
        infos = Checkpoint(folder / name).infos.values()
        rows.append(
            {
                "component": name,
                "class": entry[-1] if isinstance(entry, list) else str(entry),
                "tensors": len(infos),
                "parameters": sum(math.prod(info.shape) for info in infos),
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


def _inspect_checkpoint(path: Path) -> Rows:
    from quantkit.models.checkpoint import Checkpoint

    infos = Checkpoint(path).infos.values()
    return [
        {
            "tensor": info.name,
            "dtype": info.dtype,
            "shape": "x".join(map(str, info.shape)) or "scalar",
            "bytes": info.nbytes,
        }
        for info in infos
    ]
