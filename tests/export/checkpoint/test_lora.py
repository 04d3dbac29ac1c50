"""LoRAs through the whole route: merged before quantization, in every tensor they change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.begin import draft_export
from quantkit.export.checkpoint.run import InputScales, write_draft
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized import open_quantized
from quantkit.numerics import kernels
from tests.export.checkpoint.models import llama_tensors, read_tree, write_model, write_tensors

DOWN, UP = "lora_A.weight", "lora_B.weight"
Q = "model.layers.0.self_attn.q_proj"
RANK, ALPHA = 4, 8


def write_lora(folder: Path, *modules: str, size: float = 0.01) -> Path:
    """A peft folder that changes the named modules of the Llama of these tests."""
    shapes = {name: array.shape for name, array in llama_tensors().items()}
    rng = np.random.default_rng(1)
    tensors = {}
    for module in modules:
        rows, columns = shapes[f"{module}.weight"]
        tensors[f"base_model.model.{module}.{DOWN}"] = rng.standard_normal((RANK, columns)) * size
        tensors[f"base_model.model.{module}.{UP}"] = rng.standard_normal((rows, RANK)) * size
    folder.mkdir()
    write_tensors(
        folder / "adapter_model.safetensors",
        {name: array.astype(np.float32) for name, array in tensors.items()},
    )
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def delta(folder: Path, module: str) -> np.ndarray:
    file = Checkpoint(folder / "adapter_model.safetensors")
    a = file.read(f"base_model.model.{module}.{DOWN}").astype(np.float64)
    b = file.read(f"base_model.model.{module}.{UP}").astype(np.float64)
    return b @ a * ALPHA / RANK


def export(model: Path, out: Path, *loras: str, threads: int = 2):
    draft = draft_export(str(model), "modelopt", short="fp4", loras=loras)
    return write_draft(draft, out, inputs=InputScales(data_free=True), threads=threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "model", llama_tensors(), shards=2)


def test_a_quantized_layer_is_that_of_the_merged_weight(model: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora", Q)
    export(model, tmp_path / "out", f"{lora}:0.5")
    merged = Checkpoint(model).read(f"{Q}.weight").astype(np.float64) + 0.5 * delta(lora, Q)
    layers = open_quantized(tmp_path / "out").layers
    found = layers[Q].load()
    wanted = kernels.quantize(merged.astype(np.float32), found.format, found.tensor_scale)
    # Sums in float32 and in float64 differ in the last bit, and with it a code near a tie.
    assert np.count_nonzero(found.data != wanted.data) <= 3
    siblings = [layers[Q.replace("q_proj", name)] for name in ("k_proj", "v_proj")]
    assert {layer.tensor_scale for layer in siblings} == {layers[Q].tensor_scale}


def test_a_layer_that_stays_is_merged_too_and_keeps_its_dtype(model: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora", "lm_head", "model.embed_tokens")
    export(model, tmp_path / "out", str(lora))
    before, after = Checkpoint(model), Checkpoint(tmp_path / "out")
    for module in ("lm_head", "model.embed_tokens"):
        old, new = before.read(f"{module}.weight"), after.read(f"{module}.weight")
        assert new.dtype == old.dtype
        wanted = (old.astype(np.float64) + delta(lora, module)).astype(np.float32)
        assert np.allclose(new.astype(np.float32), wanted, rtol=2**-8)
        assert not np.array_equal(new, old)


def test_the_manifest_says_what_of_each_delta_survived(model: Path, tmp_path: Path) -> None:
    modules = (Q, "model.layers.1.mlp.down_proj")
    lora = write_lora(tmp_path / "lora", *modules, size=0.05)
    manifest = export(model, tmp_path / "out", str(lora))
    rows = manifest.export["loras"]
    assert [row["layer"] for row in rows] == sorted(modules)
    assert all(0.8 < row["share"] < 1.2 for row in rows)
    assert manifest.model["loras"] == [
        {
            "path": str(lora),
            "scale": 1.0,
            "content_key": manifest.model["loras"][0]["content_key"],
        }
    ]
    assert any("of the delta survives" in line for line in manifest.export["notes"])


def test_bytes_and_figures_do_not_depend_on_threads(model: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora", Q, "lm_head")
    runs = [export(model, tmp_path / f"{n}", str(lora), threads=n) for n in (1, 4)]
    assert read_tree(tmp_path / "1") == read_tree(tmp_path / "4")
    assert runs[0].export["loras"] == runs[1].export["loras"]


def test_a_lora_of_another_model_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path
) -> None:
    lora = write_lora(tmp_path / "lora", Q)
    other = write_model(tmp_path / "other", llama_tensors(hidden=128))
    with pytest.raises(QuantkitError, match="q_proj"):
        draft_export(str(other), "modelopt", short="fp4", loras=[str(lora)])


def test_a_lora_into_a_quantized_model_is_refused(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "out")
    lora = write_lora(tmp_path / "lora", Q)
    with pytest.raises(QuantkitError, match="--lora"):
        draft_export(str(tmp_path / "out"), "compressed-tensors", loras=[str(lora)])
