"""Verification of written checkpoints: what is right passes, and every damage is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from quantkit import streamed
from quantkit.errors import QuantkitError
from quantkit.evaluate.checkpoint import CheckpointVerification, verify_checkpoint
from quantkit.export.checkpoint.begin import draft_export
from quantkit.export.checkpoint.run import InputScales, write_draft
from quantkit.manifest import Manifest, encode_json
from quantkit.models.checkpoint import Checkpoint
from tests.evaluate import damage
from tests.export.checkpoint.models import CONFIG, llama_tensors, write_model

LAYER = "model.layers.0.mlp.up_proj"
Q = "model.layers.0.self_attn.q_proj"
WIDE = CONFIG | {"hidden_size": 128, "intermediate_size": 288, "head_dim": 32}
RECIPES = {
    "compressed-tensors": ("nvfp4", "nvfp4-weight-only", "mxfp4", "mxfp8", "fp8-dynamic"),
    "modelopt": ("nvfp4", "mxfp8", "fp8-tensor", "fp8-block"),
    "comfyui": ("nvfp4", "mxfp8", "fp8-tensor"),
    "torchao": ("nvfp4", "mxfp4", "fp8-dynamic"),
}


def export(model: Path, out: Path, to: str, inputs: InputScales | None = None, **choices) -> Path:
    draft = draft_export(str(model), to, **choices)
    write_draft(draft, out, inputs=inputs or InputScales(data_free=True), threads=2)
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and columns that padding and tiles do not divide."""
    tensors = llama_tensors(hidden=128, inner=288)
    return write_model(tmp_path_factory.mktemp("m") / "model", tensors, shards=2, config=WIDE)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("s") / "model", llama_tensors())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, single: Path) -> Callable[[str], Path]:
    """One file of NVFP4 per target, with calibrated input scales. To be read only."""
    folder = tmp_path_factory.mktemp("exported")
    draft = draft_export(str(single), "modelopt", short="fp4")
    rows = {name: {"input_amax": 1.7 + n} for n, name in enumerate(draft.plan.schemes)}
    (folder / "stats.json").write_text(json.dumps(rows))

    def get(to: str) -> Path:
        if not (folder / to).exists():
            export(single, folder / to, to, InputScales(stats=folder), short="fp4")
        return folder / to

    return get


def said(result: CheckpointVerification) -> list[tuple[str, str, str]]:
    return [(row.kind, row.name, row.what) for row in result.differences]


@pytest.mark.parametrize(("to", "recipe"), [(to, r) for to, all_ in RECIPES.items() for r in all_])
def test_what_was_exported_is_verified(to: str, recipe: str, model: Path, tmp_path: Path) -> None:
    out = export(model, tmp_path / "out", to, recipe=recipe)
    result = verify_checkpoint(out)
    assert result.passed, result.differences
    assert (result.target, result.layout) == (to, to)
    planned = [row for row in Manifest.read(out).plan if row["weight_format"]]
    assert len(result.layers) == len(result.errors) == len(planned) > 0
    assert "lm_head.weight" in result.kept
    stored = Checkpoint(out).infos
    assert result.tensors == len(stored)
    assert result.size == sum(info.nbytes for info in stored.values())
    assert all(0.01 < row["relative_l2"] < 0.2 for row in result.errors)


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt", "comfyui"])
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-tensor"])
def test_calibrated_input_scales_are_those_that_were_recorded(
    to: str, recipe: str, single: Path, tmp_path: Path
) -> None:
    """Ranges whose scale and its reciprocal do not determine each other are among them."""
    draft = draft_export(str(single), to, recipe=recipe)
    rng = np.random.default_rng(4)
    rows = {name: {"input_amax": float(rng.uniform(0.5, 30))} for name in draft.plan.schemes}
    (tmp_path / "stats.json").write_text(json.dumps(rows))
    out = export(single, tmp_path / "out", to, InputScales(stats=tmp_path), recipe=recipe)
    result = verify_checkpoint(out)
    assert result.passed, result.differences
    manifest = json.loads((out / "quantkit.json").read_text())
    manifest["export"]["input_amax"][LAYER] = 100.0
    (out / "quantkit.json").write_text(json.dumps(manifest))
    assert ("layer", LAYER, "input scale") in said(verify_checkpoint(out))


def test_the_weight_error_is_that_of_the_bytes_on_disk(
    exported: Callable[[str], Path], single: Path
) -> None:
    """Decoded here from ml_dtypes' tables, without quantkit's reader or kernels."""
    out = exported("modelopt")
    stored, source = Checkpoint(out), Checkpoint(single)
    table = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    wanted = {}
    squares = np.zeros(2)
    for row in verify_checkpoint(out).errors:
        name = row["layer"]
        data = stored.read(f"{name}.weight")
        codes = np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)
        scale = stored.read(f"{name}.weight_scale").astype(np.float64)
        decoded = table[codes] * np.repeat(scale, 16, axis=1)
        decoded *= float(stored.read(f"{name}.weight_scale_2"))
        weight = source.read(f"{name}.weight").astype(np.float64)
        sums = np.array([np.sum((decoded - weight) ** 2), np.sum(weight**2)])
        wanted[name] = np.sqrt(sums[0] / sums[1])
        squares += sums
    result = verify_checkpoint(out)
    assert {row["layer"]: row["relative_l2"] for row in result.errors} == pytest.approx(
        wanted, rel=1e-5
    )
    assert result.total == pytest.approx(np.sqrt(squares[0] / squares[1]), rel=1e-5)
    errors = [row["relative_l2"] for row in result.errors]
    assert errors == sorted(errors, reverse=True)


Damage = Callable[[Path], object]
UP, NORM = f"{LAYER}.weight", "model.norm.weight"
DAMAGES: dict[str, tuple[str, Damage, tuple[str, str, str], str]] = {
    "one nibble": (
        "modelopt",
        lambda out: damage.flip(out, UP, 5 * 32 + 3, 0x10),
        ("layer", LAYER, "codes"),
        "1 of 10,240 differ, the first at [5, 7]",
    ),
    "one nibble in ComfyUI's order": (
        "comfyui",
        lambda out: damage.flip(out, UP, 5 * 32 + 3, 0x10),
        ("layer", LAYER, "codes"),
        "1 of 10,240 differ, the first at [5, 6]",
    ),
    "one byte of a scale": (
        "modelopt",
        lambda out: damage.flip(out, f"{LAYER}.weight_scale", 4 * 2 + 1),
        ("layer", LAYER, "block scales"),
        "1 of 640 differ, the first at [2, 1]",
    ),
    "one byte of a scale in tiles": (
        "torchao",
        lambda out: damage.flip(out, f"{LAYER}._weight_scale", 0),
        ("layer", LAYER, "block scales"),
        "1 of 640 differ, the first at [0, 0]",
    ),
    "a scale that is NaN": (
        "modelopt",
        lambda out: damage.put(out, f"{LAYER}.weight_scale", b"\x7f"),
        ("layer", LAYER, "unreadable"),
        "NaN",
    ),
    "the last bit of a tensor scale": (
        "modelopt",
        lambda out: damage.flip(out, f"{LAYER}.weight_scale_2"),
        ("layer", LAYER, "tensor scale"),
        "on disk",
    ),
    "the last bit of a reciprocal": (
        "compressed-tensors",
        lambda out: damage.flip(out, f"{LAYER}.weight_global_scale"),
        ("layer", LAYER, "tensor scale"),
        "on disk",
    ),
    "the last bit of an input scale": (
        "modelopt",
        lambda out: damage.flip(out, f"{Q}.input_scale"),
        ("layer", Q, "input scale"),
        "on disk",
    ),
    "padding": (
        "comfyui",
        lambda out: damage.flip(out, f"{LAYER}.weight_scale", 1023, 0x38),
        ("tensor", f"{LAYER}.weight_scale", "bytes"),
        "1 of 1,024 differ",
    ),
    "a byte of a tensor that stays": (
        "compressed-tensors",
        lambda out: damage.flip(out, NORM, 17),
        ("tensor", NORM, "bytes"),
        "1 of 128 differ, the first at 17",
    ),
    "a tensor is gone": (
        "modelopt",
        lambda out: damage.drop(out / "model.safetensors", NORM),
        ("tensor", NORM, "missing"),
        "in none of the files",
    ),
    "a tensor of a layer is gone": (
        "modelopt",
        lambda out: damage.drop(out / "model.safetensors", f"{LAYER}.weight_scale"),
        ("tensor", f"{LAYER}.weight_scale", "missing"),
        "in none of the files",
    ),
    "a tensor is added": (
        "torchao",
        lambda out: damage.add(out / "model.safetensors", "model.extra.weight", NORM),
        ("tensor", "model.extra.weight", "extra"),
        "BF16 [64], which was not written",
    ),
    "two layers change places": (
        "modelopt",
        lambda out: damage.swap(out / "model.safetensors", Q, Q.replace("q_proj", "o_proj")),
        ("layer", Q, "codes"),
        "of 4,096 differ",
    ),
    "two kept tensors change places": (
        "modelopt",
        lambda out: damage.swap(out / "model.safetensors", "lm_head", "model.embed_tokens"),
        ("tensor", "lm_head.weight", "bytes"),
        "of 12,288 differ",
    ),
    "another dtype": (
        "modelopt",
        lambda out: damage.edit_header(
            out / "model.safetensors", lambda h: {**h, NORM: {**h[NORM], "dtype": "F16"}}
        ),
        ("tensor", NORM, "dtype"),
        "F16 on disk, BF16 made",
    ),
    "another shape": (
        "modelopt",
        lambda out: damage.edit_header(
            out / "model.safetensors",
            lambda h: {**h, "lm_head.weight": {**h["lm_head.weight"], "shape": [64, 96]}},
        ),
        ("tensor", "lm_head.weight", "shape"),
        "(64, 96) on disk, (96, 64) made",
    ),
    "a configuration": (
        "modelopt",
        lambda out: edit_json(out / "config.json", lambda c: c | {"rms_norm_eps": 1e-6}),
        ("file", "config.json", "content"),
        "rms_norm_eps was changed",
    ),
    "metadata": (
        "comfyui",
        lambda out: damage.edit_header(
            out / "model.safetensors",
            lambda h: {**h, "__metadata__": {**h["__metadata__"], "license": "mine"}},
        ),
        ("file", "model.safetensors", "metadata"),
        "license was not there",
    ),
    "a file cut short": (
        "modelopt",
        lambda out: os.truncate(out / "model.safetensors", 4000),
        ("file", "model.safetensors", "unreadable"),
        "",
    ),
}


def edit_json(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


@pytest.mark.parametrize("case", DAMAGES)
def test_every_damage_is_found_and_named(
    case: str, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    to, hurt, row, detail = DAMAGES[case]
    out = Path(shutil.copytree(exported(to), tmp_path / "out"))
    assert verify_checkpoint(out).passed
    hurt(out)
    result = verify_checkpoint(out)
    assert not result.passed
    assert row in said(result), result.differences
    found = next(each for each in result.differences if (each.kind, each.name, each.what) == row)
    assert detail in found.detail
    content = json.loads(encode_json(result.to_json()))
    assert content["passed"] is False
    assert content["differences"]


def test_only_what_was_damaged_is_named(exported: Callable[[str], Path], tmp_path: Path) -> None:
    out = Path(shutil.copytree(exported("modelopt"), tmp_path / "out"))
    damage.flip(out, UP)
    result = verify_checkpoint(out)
    assert said(result) == [("layer", LAYER, "codes")]
    content = result.to_json()
    assert content["weights"]["different"] == [LAYER]
    assert content["weights"]["identical"] == 13
    assert content["kept"]["identical"] == content["kept"]["checked"] == 7


def test_a_reader_that_finds_another_format_is_no_match(
    exported: Callable[[str], Path], tmp_path: Path
) -> None:
    """The bytes are right and config.json calls the inputs untouched."""
    out = Path(shutil.copytree(exported("compressed-tensors"), tmp_path / "out"))

    def change(config: dict[str, Any]) -> dict[str, Any]:
        (group,) = config["quantization_config"]["config_groups"].values()
        group["input_activations"] = None
        return config

    edit_json(out / "config.json", change)
    result = verify_checkpoint(out)
    assert ("layer", LAYER, "format") in said(result)
    assert ("file", "config.json", "content") in said(result)


def test_a_writer_that_swaps_nibbles_is_found_although_it_swaps_again(
    exported: Callable[[str], Path], tmp_path: Path, single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides write the same wrong bytes; the reader on disk is the one that disagrees."""
    from quantkit.export.checkpoint import modelopt
    from quantkit.numerics.layouts import swap_nibbles

    real = modelopt.slots

    def wrong(layer):
        first, *rest = real(layer)
        encode = first.encode
        object.__setattr__(first, "encode", lambda q: swap_nibbles(encode(q)))
        return [first, *rest]

    object.__setattr__(modelopt.TARGET, "slots", wrong)
    try:
        out = export(single, tmp_path / "out", "modelopt", short="fp4")
        result = verify_checkpoint(out)
    finally:
        object.__setattr__(modelopt.TARGET, "slots", real)
    assert set(result.to_json()["weights"]["different"]) == set(result.layers)
    assert {row.what for row in result.differences} == {"codes"}
    assert result.total is not None
    assert result.total > 1


def test_wrong_codes_that_both_sides_make_show_in_the_weight_error(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.algorithms import ALGORITHMS

    row = ALGORITHMS["rounding"]
    function = row.function

    def negated(weight: NDArray[Any], fmt, stats):
        return function(-weight, fmt, stats)

    monkeypatch.setitem(ALGORITHMS, "rounding", type(row)(**{**_fields(row), "function": negated}))
    out = export(single, tmp_path / "out", "modelopt", short="fp4")
    result = verify_checkpoint(out)
    assert not result.differences
    assert len(result.warnings) == 14
    assert "away from the original" in result.warnings[0]
    assert all(row["relative_l2"] > 1.9 for row in result.errors)


def _fields(row: object) -> dict[str, Any]:
    from dataclasses import fields

    return {field.name: getattr(row, field.name) for field in fields(row)}  # type: ignore[arg-type]


@pytest.mark.parametrize("to", ["modelopt", "comfyui"])
def test_nothing_depends_on_threads_or_chunks(
    to: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = export(model, tmp_path / "out", to, short="fp4")
    damage.flip(out, UP, 140 * 64 + 3, 0x10)
    damage.flip(out, UP, 3)
    found = []
    for threads, chunk in ((1, 1 << 20), (2, 1 << 14), (5, 1 << 15)):
        monkeypatch.setattr(streamed, "CHUNK", chunk)
        result = verify_checkpoint(out, threads=threads)
        content = result.to_json()
        # Sums of float32 squares are cut where chunks are.
        errors = [round(row["relative_l2"], 6) for row in content.pop("weight_error")["rows"]]
        found.append((errors, content))
    assert found[0] == found[1] == found[2]
    (row,) = found[0][1]["differences"]
    assert row["detail"].startswith("2 of 36,864 differ, the first at [0, ")


def test_a_source_with_other_headers_is_refused(
    single: Path, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", llama_tensors(inner=192))
    with pytest.raises(QuantkitError, match=r"other is not the model that .* was made from"):
        verify_checkpoint(exported("modelopt"), model=str(other))


def test_a_source_that_moved_is_named_by_the_user(single: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(single, tmp_path / "a"))
    out = export(moved, tmp_path / "out", "modelopt", short="fp4")
    moved.rename(tmp_path / "b")
    with pytest.raises(QuantkitError, match=r"if it moved, say where it is with --model"):
        verify_checkpoint(out)
    assert verify_checkpoint(out, model=str(tmp_path / "b")).passed


def test_a_source_whose_bytes_changed_is_another_model(single: Path, tmp_path: Path) -> None:
    """Its headers are the same, so the comparison finds it, and its date explains it."""
    source = Path(shutil.copytree(single, tmp_path / "m"))
    out = export(source, tmp_path / "out", "modelopt", short="fp4")
    damage.flip(source, UP, 9, 0x40)
    file = source / "model.safetensors"
    os.utime(file, (file.stat().st_atime, file.stat().st_mtime + 60))
    result = verify_checkpoint(out)
    assert LAYER in result.to_json()["weights"]["different"]
    assert any("written after the export" in line for line in result.warnings)


def test_the_recorded_plan_counts_and_not_the_recipe_of_today(single: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    shutil.copyfile(Path("quantkit/recipes/nvfp4-weight-only.yaml"), recipe)
    out = export(single, tmp_path / "out", "compressed-tensors", recipe=str(recipe))
    recipe.write_text("description: gone\n")
    assert verify_checkpoint(out).passed


def test_a_repack_is_compared_with_its_source(
    exported: Callable[[str], Path], tmp_path: Path
) -> None:
    source = exported("modelopt")
    out = export(source, tmp_path / "out", "compressed-tensors")
    result = verify_checkpoint(out)
    assert result.passed
    assert len(result.layers) == 14
    assert result.errors == []
    assert result.total is None
    damage.flip(out, f"{LAYER}.weight_packed")
    assert said(verify_checkpoint(out)) == [("layer", LAYER, "codes")]


@pytest.mark.parametrize("first", ["modelopt", "compressed-tensors", "comfyui", "torchao"])
@pytest.mark.parametrize("second", ["modelopt", "compressed-tensors", "comfyui", "torchao"])
def test_repacks_of_all_pairs_are_verified(
    first: str, second: str, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    out = export(exported(first), tmp_path / "out", second)
    result = verify_checkpoint(out)
    assert result.passed, result.differences
