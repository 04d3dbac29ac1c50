"""Everything before a target: open, trace, plan; then measure, calibrate, and hand out weights.

Two steps, because the first answers `--dry-run` from headers alone and the second does the long
work. Both return plain values, and an exporter sees nothing but what they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.algorithms import ALGORITHMS
from quantkit.calibrate.data import check_path, load_batches
from quantkit.calibrate.observe import calibrate
from quantkit.calibrate.stats import Stats
from quantkit.calibrate.stream import borrowed_weights
from quantkit.errors import QuantkitError
from quantkit.manifest import Manifest, read_json, write_json
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.lora.file import LoraSpec, describe_loras, open_lora, parse_lora
from quantkit.models.lora.source import merge_loras
from quantkit.models.model_source import Source
from quantkit.models.quantized import quantkit as quantized_layout
from quantkit.models.source import open_model
from quantkit.models.tensors import SAFETENSORS_NAMES
from quantkit.models.trace import Traced, trace
from quantkit.numerics.qtensor import QTensor
from quantkit.progress import Progress, silence
from quantkit.recipes.loader import describe_recipe, load_recipe, pick_recipe
from quantkit.recipes.plan import Plan
from quantkit.recipes.recipe import Layer
from quantkit.weights import Weights, has_static_scale, measure

STATS_FILE = "stats.json"
COMPUTE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# Above this a model is not loaded to be calibrated: each layer borrows its weights while it runs.
LOAD_LIMIT_BYTES = 1 << 30
# Interpreter, libraries and a traced graph, rounded up: the whole export of a 2-billion-parameter
# model peaks at 0.88 GB (benchmarks/results/export_scale.json), and 1.27 GB is expected for it.
BASE_MEMORY_BYTES = 700_000_000


@dataclass(frozen=True, slots=True)
class Planned:
    """A model and what each of its layers will become. No weight has been read.

    recipe: the `recipe` entry of quantkit.json, see `describe_recipe`.
    """

    traced: Traced
    plan: Plan
    recipe: Mapping[str, Any]

    @property
    def source(self) -> Source:
        """The opened model."""
        return self.traced.source

    @property
    def picked(self) -> str:
        """How the recipe was chosen, for people."""
        return str(self.recipe["source"])


@dataclass(frozen=True, slots=True)
class Prepared:
    """A planned model with everything an exporter needs.

    calibration: where the data came from and which layers it never reached, for the manifest.
    warnings: what the user should know, gathered so far.
    """

    planned: Planned
    weights: Weights
    stats: Mapping[str, Stats]
    calibration: Mapping[str, Any]
    warnings: tuple[str, ...]


def plan_model(
    model: str | Path | Source,
    *,
    recipe: str | None = None,
    short: str | None = None,
    compute_dtype: str = "auto",
    loras: Sequence[str] = (),
) -> Planned:
    """Open and trace a model and decide every layer.

    model: see `open_model`. recipe: name or file; short: "fp4" or "fp8", the recipe that suits the
    model's class; exactly one of the two. compute_dtype: "auto" (the checkpoint's), "fp32", "fp16"
    or "bf16". loras: FILE[:SCALE] each, merged into the weights in float32.
    Raises QuantkitError for anything the user can fix.
    """
    if (recipe is None) == (short is None):
        raise QuantkitError("say what to make: one of --fp4, --fp8 or --recipe NAME|FILE")
    source = model if isinstance(model, Source) else open_model(str(model))
    dtype = find_dtype(compute_dtype, source)
    if recipe is not None:
        chosen, picked = load_recipe(recipe), f"recipe {recipe}"
    else:
        assert short is not None
        chosen, picked = pick_recipe(short, source.model_class)
    traced = trace(source, dtype)
    if loras:
        opened = [open_lora(parse_lora(spec)) for spec in loras]
        transposed = {layer.weight for layer in traced.layers if layer.transposed}
        traced = replace(traced, source=merge_loras(source, opened, transposed=transposed))
    plan = chosen.plan(traced.layers)
    _check_algorithms(plan)
    return Planned(traced, plan, describe_recipe(chosen, picked, plan))


def find_dtype(compute_dtype: str, source: Source) -> torch.dtype:
    """The dtype that `--compute-dtype` means for a source.

    Raises QuantkitError for a dtype that no exported model computes in, whoever asked for it.
    """
    if compute_dtype in COMPUTE_DTYPES:
        return COMPUTE_DTYPES[compute_dtype]
    if compute_dtype != "auto":
        raise QuantkitError(
            f"unknown compute dtype {compute_dtype!r}; known: auto, {', '.join(COMPUTE_DTYPES)}"
        )
    if source.torch_dtype not in COMPUTE_DTYPES.values():
        raise QuantkitError(
            f"{source.spec} is stored in {source.dtype}, which nothing computes in; choose with "
            f"--compute-dtype: {', '.join(COMPUTE_DTYPES)}"
        )
    return source.torch_dtype


def _check_algorithms(plan: Plan) -> None:
    for name, scheme in plan.schemes.items():
        if scheme.algorithm not in ALGORITHMS:
            raise QuantkitError(
                f"recipe {plan.recipe} asks for algorithm {scheme.algorithm!r} for {name}; known: "
                f"{', '.join(sorted(ALGORITHMS))}"
            )


def prepare(
    planned: Planned,
    *,
    calibration: str | Path | Iterable[Mapping[str, Tensor]] | None = None,
    limit: int | None = None,
    device: str = "cpu",
    progress: Progress = silence,
) -> Prepared:
    """Check and measure the weights, calibrate where a scheme needs it, and make `Weights`.

    calibration, limit: see `load_batches`. device: where calibration runs.
    Raises QuantkitError for a NaN or Inf in a weight before anything long is done.
    """
    traced, plan, source = planned.traced, planned.plan, planned.source
    check_device(device)
    if isinstance(calibration, str | Path):
        check_path(calibration)
    others = [name for name, _ in traced.module.named_parameters()]
    with progress("Reading weights") as advance:
        amax = measure(plan, source.read_weight, others=others, progress=advance)
    warnings = [*source.notes, *plan.warnings()]
    stats: Mapping[str, Stats] = {}
    description: Mapping[str, Any] = {}
    if needs_data(plan):
        layers = [decision.layer for decision in plan.quantized]
        seen = calibrate_layers(
            source,
            layers,
            traced.dtype,
            data=calibration,
            limit=limit,
            device=device,
            progress=progress,
        )
        stats, description = seen.stats, seen.description
        warnings += seen.warnings
    elif calibration is not None:
        warnings.append(f"recipe {plan.recipe} needs no calibration data: not used")
    weights = Weights(plan, stats, source.read_weight, amax)
    return Prepared(planned, weights, stats, description, tuple(warnings))


@dataclass(frozen=True, slots=True)
class Seen:
    """What calibration of some layers found. description: for the manifest."""

    stats: Mapping[str, Stats]
    description: Mapping[str, Any]
    warnings: tuple[str, ...]


def calibrate_layers(
    source: Source,
    layers: Sequence[Layer],
    dtype: torch.dtype,
    *,
    data: str | Path | Iterable[Mapping[str, Tensor]] | None = None,
    limit: int | None = None,
    device: str = "cpu",
    progress: Progress = silence,
) -> Seen:
    """Run data through the model and see the inputs of `layers`, which are named as its modules.

    data, limit: see `load_batches`. Raises QuantkitError as that and `calibrate` do.
    """
    with progress("Loading calibration data") as advance:
        batches, described = load_batches(data, source, limit=limit, dtype=dtype, progress=advance)
    with running_module(source, dtype, device) as module, progress("Calibrating") as advance:
        seen = calibrate(module, batches, layers, call=source.call, progress=advance)
    warning = described["warning"]
    return Seen(
        seen.stats,
        {**described, "uncalibrated": list(seen.uncalibrated)},
        (*([warning] if warning else []), *seen.warnings),
    )


def reopen(folder: Path, model: str | None = None) -> Prepared:
    """A quantized folder (`quantkit quantize`) as it was prepared: same plan, scales and codes.

    model: where the original lies now, by default where it lay then; it gives the graph and all
    that stays in high precision. Raises QuantkitError when it is not the model that was quantized.
    """
    manifest = Manifest.read(folder)
    source = open_recorded(manifest, folder, model)
    traced = trace(source, getattr(torch, str(manifest.compute_dtype)))
    plan = Plan.from_rows(manifest.recipe["name"], manifest.plan, traced.layers)
    stats, amax = read_stats(folder, plan)
    checkpoint = Checkpoint(folder / quantized_layout.FILE)
    shapes = {d.layer.name: d.layer.shape for d in plan.quantized}

    def load(name: str) -> QTensor:
        rows, columns = shapes[name]
        fmt = plan.schemes[name].weight
        return quantized_layout.read_qtensor(checkpoint, name, fmt, (rows, columns))

    weights = Weights(plan, stats, source.read_weight, amax, stored=load)
    planned = Planned(traced, plan, manifest.recipe)
    return Prepared(planned, weights, stats, manifest.calibration, tuple(manifest.warnings))


def open_recorded(manifest: Manifest, folder: Path, model: str | None = None) -> Source:
    """The model that a manifest names; QuantkitError when its content is not what it was."""
    spec = model or str(manifest.model["spec"])
    try:
        source = open_model(spec)
    except QuantkitError as error:
        raise QuantkitError(
            f"{error} ({folder} was made from {manifest.model['spec']}; if it moved, say where it "
            "is with --model)"
        ) from None
    if manifest.model.get("loras"):
        recorded = [LoraSpec(Path(row["path"]), row["scale"]) for row in manifest.model["loras"]]
        transposed = {row["weight"] for row in manifest.plan if row["transposed"]}
        source = merge_loras(source, [open_lora(lora) for lora in recorded], transposed=transposed)
    if source.content_key() != manifest.model["content_key"]:
        raise QuantkitError(
            f"{source.spec} is not the model that {folder} was made from (its content changed); "
            "make it again, or name the right one with --model"
        )
    return source


def write_stats(prepared: Prepared, folder: Path) -> None:
    """What calibration and pass 1 saw, layer by layer; the same scales follow from it."""
    weights = prepared.weights
    write_json(
        folder / STATS_FILE,
        {
            name: {
                "weight_amax": weights.amax(name),
                "input_amax": weights.stats[name].input_amax if name in weights.stats else None,
                "batches": weights.stats[name].batches if name in weights.stats else 0,
            }
            for name in weights
        },
    )


def read_stats(folder: Path, plan: Plan) -> tuple[dict[str, Stats], dict[str, float]]:
    """Statistics and weight maxima by layer name, as `write_stats` wrote them for this plan.

    Raises QuantkitError when the file is damaged or lacks a layer that the plan quantizes.
    """
    path = folder / STATS_FILE
    rows = read_json(path)
    try:
        chosen = {name: rows[name] for name in plan.schemes}
        stats = {
            name: Stats(input_amax=row["input_amax"], batches=row["batches"])
            for name, row in chosen.items()
        }
        return stats, {name: float(row["weight_amax"]) for name, row in chosen.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise QuantkitError(
            f"{path} does not hold the statistics of the plan beside it ({error!r}); make the "
            "folder again"
        ) from error


def needs_data(plan: Plan) -> bool:
    """Whether any scheme of the plan needs to see activations."""
    return any(
        (scheme.input is not None and has_static_scale(scheme.input))
        or ALGORITHMS[scheme.algorithm].needs - {"weight_amax"}
        for scheme in plan.schemes.values()
    )


def check_device(device: str) -> None:
    """QuantkitError when torch cannot compute on `device` here; cheap, so before long work."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        # torch raises AssertionError where it was built without CUDA.
        reason = str(error).strip().partition("\n")[0]
        raise QuantkitError(f"device {device!r} cannot be used here: {reason}; use cpu") from None


def running_module(
    source: Source, dtype: torch.dtype, device: str = "cpu"
) -> AbstractContextManager[nn.Module]:
    """The model, able to run: loaded when it is small, else borrowing weights layer by layer."""
    if source.parameters * dtype.itemsize <= LOAD_LIMIT_BYTES:
        return nullcontext(source.load(dtype).to(device))
    module = source.build(dtype)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta:
                part._buffers[name] = buffer.to(device)
    return borrowed_weights(module, source.read_weight, device=device)


def estimate_peak_memory(planned: Planned) -> int:
    """Bytes that an export is expected to need at its peak, from shapes alone.

    The interpreter with its libraries, the model where it is small enough to be loaded for
    calibration, and the largest weight: as stored, in float32, and as codes.
    """
    largest = max((d.layer.size for d in planned.plan.decisions), default=0)
    whole = planned.source.parameters * planned.traced.dtype.itemsize
    loaded = whole if needs_data(planned.plan) and whole <= LOAD_LIMIT_BYTES else 0
    return loaded + peak_memory(largest, str(planned.traced.dtype).removeprefix("torch."))


def peak_memory(largest: int, dtype: str) -> int:
    """Bytes at the peak of an export that loads no model, by the size of its largest weight.

    dtype: torch's name of the compute dtype ("bfloat16").
    """
    itemsize: int = getattr(torch, dtype).itemsize
    return BASE_MEMORY_BYTES + largest * (itemsize + 4 + 1)


def describe_model(source: Source) -> dict[str, Any]:
    """The `model` entry of quantkit.json."""
    return {
        "spec": source.spec,
        "kind": source.kind,
        "model_class": source.model_class,
        "task": source.task,
        "dtype": source.dtype,
        "parameters": source.parameters,
        "content_key": source.content_key(),
        **describe_loras(source.loras),
    }


def kept_dtype(planned: Planned) -> str:
    """Safetensors spelling of the dtype that layers which stay are written in."""
    return SAFETENSORS_NAMES[planned.traced.dtype]
