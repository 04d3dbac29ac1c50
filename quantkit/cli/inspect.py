"""quantkit inspect: what is in this file, and what names there are to choose from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli import options as opt
from quantkit.cli.console import Console
from quantkit.cli.inspect_checkpoint import (
    Inspected,
    as_text,
    inspect_checkpoint,
    shape_text,
    table,
)
from quantkit.cli.inspect_file import inspect_file, is_checkpoint
from quantkit.errors import QuantkitError


def inspect(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="A model folder, .safetensors, .gguf, a folder that quantkit wrote, .onnx, "
            ".engine.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="ORIGINAL",
            help="Compare a quantized FILE with the weights it was made from: settles nibble "
            "order, scale layout and direction.",
            show_default=False,
        ),
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help="Also read .pt, .bin, .ckpt and .pth: their tensors only, no code is run.",
        ),
    ] = False,
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
    """Show what a file holds and what is wrong with it, or list choices.

    Of a checkpoint: its layout and where that loads, formats, what stayed in high precision, and
    problems with their fixes; -v shows every tensor. Exits 1 when a problem breaks something. With
    --layers, FILE is a MODEL as `quantkit export` takes it. The other options list what can be
    named elsewhere.
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
    texts = [_as_text(rows) for rows in chosen.values()]
    content: dict[str, Any] = dict(chosen)
    seen: Inspected | None = None
    if layers:
        if file is None:
            raise QuantkitError("--layers needs a model: quantkit inspect MODEL --layers")
        with console.progress("Reading the model"):
            content["layers"] = _layers(file)
        texts.append(_as_text(content["layers"]))
    elif file is not None and is_checkpoint(Path(file)):
        with console.progress("Reading the checkpoint"):
            seen = inspect_checkpoint(Path(file), allow_pickle=allow_pickle, against=against)
        content |= seen.to_json()
        texts.append(as_text(seen, verbose))
    elif file is not None:
        if against is not None:
            raise QuantkitError(f"--against compares checkpoints, and {file} is none")
        content["content"] = inspect_file(Path(file))
        texts.append(_as_text(content["content"]))
    if not content:
        raise QuantkitError("name a file, or one of --layers, --" + ", --".join(lists))
    console.result(content, "\n\n".join(texts))
    console.next("quantkit", *_next(file, seen))
    if seen is not None and not seen.answer:
        raise typer.Exit(1)


Rows = list[dict[str, Any]]


def _as_text(rows: Rows) -> str:
    """A table; of a description only the first sentence, --json has the rest."""
    short = [{key: _cell(key, value) for key, value in row.items()} for row in rows]
    return table(short) or "nothing in it"


def _cell(key: str, value: object) -> str:
    return str(value).partition(". ")[0] if key == "description" else str(value)


def _next(file: str | None, seen: Inspected | None) -> tuple[str | Path, ...]:
    """What one does with what was shown."""
    if file is None:
        return "inspect", "MODEL", "--layers"
    path = Path(file)
    if seen is not None and seen.summary.formats:
        if seen.matches is None:
            return "inspect", path, "--against", "ORIGINAL"
        return "export", path, "--to", "TARGET", "-o", "OUT"
    if (path / "model.onnx").is_file():
        return "verify", path
    if (path / "quantkit.json").is_file():
        return "export", path, "-o", "OUT"
    if path.suffix == ".onnx":
        return "lint", path
    if path.suffix == ".engine":
        return "audit", path.parent
    if seen is not None and path.is_file() and not (path.parent / "config.json").is_file():
        return "export", "--fp4", path, "--to", "TARGET", "--dry-run"
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
            "shape": shape_text(layer.shape),
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
    from quantkit.export.checkpoint.draft import spell_pair
    from quantkit.export.checkpoint.targets import CHECKPOINT_TARGETS
    from quantkit.export.onnx import DIALECTS

    rows = [
        ("onnx", "quantkit export", f"ONNX with DQ nodes; dialects {', '.join(DIALECTS)}", "-"),
        ("quantkit", "quantkit quantize", "plain codes and scales, for any target later", "-"),
    ]
    rows += [
        (
            target.name,
            f"quantkit export --to {target.name}",
            target.description,
            ", ".join(sorted(map(spell_pair, target.holds))),
        )
        for target in CHECKPOINT_TARGETS.values()
    ]
    return [dict(zip(("target", "command", "for", "holds"), row, strict=True)) for row in rows]


def _runtimes() -> Rows:
    from quantkit.engines.build import RUNTIMES

    return [
        {"runtime": name, "target": target, "holds": ", ".join(sorted(holds.holds)) or "-"}
        for name, runtime in RUNTIMES.items()
        for target, holds in runtime.targets.items()
    ]
