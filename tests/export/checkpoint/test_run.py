"""The whole route: headers, plan, scales, bytes, and what stands beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from quantkit import streamed
from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.begin import draft_export
from quantkit.export.checkpoint.run import InputScales, write_draft
from quantkit.export.checkpoint.targets import CHECKPOINT_TARGETS
from quantkit.manifest import Manifest
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized import open_quantized
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from tests.export.checkpoint.models import llama_tensors, read_tree, write_model, write_tensors

DATA_FREE = InputScales(data_free=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "model", llama_tensors(), shards=3)


def export(model: Path, out: Path, to: str = "modelopt", **choices) -> Manifest:
    options = {key: choices.pop(key) for key in ("recipe", "short", "original") if key in choices}
    draft = draft_export(str(model), to, **options)
    return write_draft(draft, out, **({"inputs": DATA_FREE} | choices))


def test_codes_and_scales_are_those_of_the_kernels_with_scales_shared_by_siblings(
    model: Path, tmp_path: Path
) -> None:
    export(model, tmp_path / "out", short="fp4")
    source, written = Checkpoint(model), open_quantized(tmp_path / "out")
    block = "model.layers.0.self_attn."
    group = [source.read(f"{block}{name}_proj.weight") for name in "qkv"]
    amax = max(kernels.amax(weight) for weight in group)
    for name, weight in zip("qkv", group, strict=True):
        wanted = kernels.quantize(weight, FORMATS["nvfp4"], np.float32(amax) / np.float32(2688))
        found = written.layers[f"{block}{name}_proj"].load()
        assert np.array_equal(found.data, wanted.data)
        assert np.array_equal(found.scale, wanted.scale)
        assert found.tensor_scale == wanted.tensor_scale


def test_what_stays_is_copied_bit_for_bit_and_listed_with_its_reason(
    model: Path, tmp_path: Path
) -> None:
    manifest = export(model, tmp_path / "out", short="fp4")
    source, written = Checkpoint(model), Checkpoint(tmp_path / "out")
    kept = [row for row in manifest.plan if row["weight_format"] is None]
    assert {"lm_head", "model.embed_tokens", "model.norm"} <= {row["layer"] for row in kept}
    assert all(row["reason"] for row in kept)
    for row in kept:
        before, after = source.read(row["weight"]), written.read(row["weight"])
        assert before.tobytes() == after.tobytes()
        assert before.dtype == after.dtype


def test_the_output_is_complete_and_keeps_its_shards(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(model, out, short="fp4")
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "tokenizer.json", "generation_config.json", "quantkit.json"} <= names
    assert {path.name for path in model.glob("*.safetensors")} <= names
    index = json.loads((out / "model.safetensors.index.json").read_text())
    stored = Checkpoint(out).infos
    assert index["weight_map"] == {name: info.file.name for name, info in stored.items()}
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in stored.values())
    moved = tmp_path / "elsewhere"
    shutil.move(out, moved)
    assert open_quantized(moved).layers


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors", "comfyui", "torchao"])
def test_bytes_depend_neither_on_threads_nor_on_chunks(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than a chunk has, and not a multiple of it."""
    model = write_model(tmp_path / "model", llama_tensors(hidden=128, inner=704, layers=1))
    trees = []
    for number, (threads, chunk) in enumerate([(1, 1 << 20), (2, 1 << 14), (5, 1 << 15)]):
        monkeypatch.setattr(streamed, "CHUNK", chunk)
        export(model, tmp_path / f"out{number}", to, short="fp4", threads=threads)
        trees.append(read_tree(tmp_path / f"out{number}"))
    assert trees[0] == trees[1] == trees[2]


def test_nothing_is_left_when_a_weight_holds_nan(tmp_path: Path) -> None:
    """Case C05: named, counted, and before anything looks finished."""
    tensors = llama_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    model = write_model(tmp_path / "model", tensors)
    for recipe in ("nvfp4", "mxfp4", "fp8-dynamic"):
        with pytest.raises(QuantkitError, match=r"model\.layers\.1\.mlp\.up_proj.*NaN.*\[3, 5\]"):
            export(model, tmp_path / "out", "compressed-tensors", recipe=recipe)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_nan_in_a_tensor_that_stays_is_found_too(tmp_path: Path) -> None:
    """Case C05: Inf in an embedding would be copied without a word."""
    tensors = llama_tensors()
    tensors["model.embed_tokens.weight"][0, 0] = np.inf
    model = write_model(tmp_path / "model", tensors)
    with pytest.raises(QuantkitError, match=r"model\.embed_tokens\.weight"):
        export(model, tmp_path / "out", short="fp4")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_zero_weights_give_legal_scales_everywhere(tmp_path: Path) -> None:
    """Case C01: an all-zero layer and an all-zero block; other tools write NaN."""
    tensors = llama_tensors()
    tensors["model.layers.0.mlp.down_proj.weight"][:] = 0
    tensors["model.layers.0.self_attn.o_proj.weight"][3, 16:32] = 0
    model = write_model(tmp_path / "model", tensors)
    for to in ("modelopt", "compressed-tensors", "comfyui", "torchao"):
        export(model, tmp_path / to, to, short="fp4")
        layers = open_quantized(tmp_path / to).layers
        down = layers["model.layers.0.mlp.down_proj"].load()
        assert not kernels.dequantize(down).any()
        assert down.tensor_scale == 1
        out = kernels.dequantize(layers["model.layers.0.self_attn.o_proj"].load())
        assert np.isfinite(out).all()
        assert not out[3, 16:32].any()


def test_a_layer_that_loses_its_small_weights_is_named(tmp_path: Path) -> None:
    """Case C03: one huge weight pushes the rest below what the block scale can say."""
    tensors = llama_tensors()
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 1e4
    model = write_model(tmp_path / "model", tensors)
    manifest = export(model, tmp_path / "out", short="fp4")
    assert any("mlp.down_proj" in line and "become 0" in line for line in manifest.warnings)


@pytest.mark.parametrize("first", ["modelopt", "compressed-tensors", "comfyui", "torchao"])
@pytest.mark.parametrize("second", ["modelopt", "compressed-tensors", "comfyui", "torchao"])
def test_every_pair_of_nvfp4_layouts_goes_there_and_back_without_a_changed_byte(
    first: str, second: str, model: Path, tmp_path: Path
) -> None:
    export(model, tmp_path / "a", first, short="fp4")
    export(tmp_path / "a", tmp_path / "b", second)
    export(tmp_path / "b", tmp_path / "c", first)
    a, c = Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "c")
    assert a.infos.keys() == c.infos.keys()
    for name in a.infos:
        assert a.read(name).tobytes() == c.read(name).tobytes(), name


def test_quantizing_a_quantized_model_is_refused_and_says_why(model: Path, tmp_path: Path) -> None:
    """Case C28: FP4 of FP4 would round twice."""
    export(model, tmp_path / "a", "modelopt", short="fp4")
    with pytest.raises(QuantkitError, match=r"quantized already.*round twice"):
        draft_export(str(tmp_path / "a"), "compressed-tensors", short="fp4")


def test_a_layout_that_cannot_hold_the_format_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", llama_tensors(hidden=128, inner=256))
    export(model, tmp_path / "a", "compressed-tensors", recipe="fp8-block")
    with pytest.raises(QuantkitError, match="comfyui cannot hold fp8_block"):
        draft_export(str(tmp_path / "a"), "comfyui")
    with pytest.raises(QuantkitError, match="cannot hold fp8_block"):
        draft_export(str(model), "comfyui", recipe="fp8-block")


def test_input_scales_come_from_saved_statistics(model: Path, tmp_path: Path) -> None:
    """Names in stats.json are those of the module: here without the checkpoint's prefix."""
    draft = draft_export(str(model), "modelopt", short="fp4")
    names = list(draft.plan.schemes)
    rows = {
        name.removeprefix("model."): {"weight_amax": 1.0, "input_amax": 1.5 + n, "batches": 1}
        for n, name in enumerate(names)
    }
    (tmp_path / "stats.json").write_text(json.dumps(rows))
    write_draft(draft, tmp_path / "out", inputs=InputScales(stats=tmp_path))
    layers = open_quantized(tmp_path / "out").layers
    qkv = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    wanted = max(1.5 + names.index(name) for name in qkv)
    for name in qkv:
        scale = layers[name].input_scale
        assert scale is not None
        assert scale.multiplier == np.float32(wanted) / np.float32(2688)


def test_statistics_that_lack_a_layer_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    (tmp_path / "stats.json").write_text("{}")
    draft = draft_export(str(model), "modelopt", short="fp4")
    with pytest.raises(QuantkitError, match=r"no input range for model\.layers\.0"):
        write_draft(draft, tmp_path / "out", inputs=InputScales(stats=tmp_path))
    assert not (tmp_path / "out").exists()


def test_the_documented_default_is_an_input_scale_of_one(model: Path, tmp_path: Path) -> None:
    manifest = export(model, tmp_path / "out", short="fp4")
    scales = {layer.input_scale for layer in open_quantized(tmp_path / "out").layers.values()}
    assert {(float(s.multiplier), float(s.divisor)) for s in scales if s} == {(1.0, 1.0)}
    assert "--data-free" in manifest.calibration["source"]


def test_a_bare_file_is_exported_without_a_config(tmp_path: Path) -> None:
    file = write_tensors(tmp_path / "m.safetensors", llama_tensors())
    export(file, tmp_path / "out", "comfyui", short="fp4", inputs=InputScales())
    assert open_quantized(tmp_path / "out").layers
    assert not (tmp_path / "out" / "config.json").exists()


def test_every_target_is_in_the_table_under_its_own_name() -> None:
    assert all(name == target.name for name, target in CHECKPOINT_TARGETS.items())
    assert all(
        weight in FORMATS and (entry is None or entry in FORMATS)
        for target in CHECKPOINT_TARGETS.values()
        for weight, entry in target.holds
    )


def test_a_family_recipe_that_the_target_cannot_hold_gives_way_to_the_general_one(
    tmp_path: Path,
) -> None:
    """FLUX's modulation is FP8 weight-only in `flux-nvfp4`, for which ModelOpt has no name."""
    rng = np.random.default_rng(0)
    tensors = {
        f"double_blocks.{n}.{name}.weight": rng.standard_normal(shape, dtype=np.float32)
        for n in range(2)
        for name, shape in {
            "img_attn.qkv": (384, 128),
            "img_mlp.0": (512, 128),
            "img_mod.lin": (768, 128),
        }.items()
    }
    file = write_tensors(tmp_path / "flux.safetensors", tensors)
    kept = draft_export(str(file), "modelopt", short="fp4")
    held = draft_export(str(file), "compressed-tensors", short="fp4")
    assert kept.recipe["name"] == "nvfp4"
    assert "double_blocks.0.img_mod.lin" not in kept.plan.schemes
    assert held.recipe["name"] == "flux-nvfp4"
    assert held.plan.schemes["double_blocks.0.img_mod.lin"].weight.name == "fp8"
