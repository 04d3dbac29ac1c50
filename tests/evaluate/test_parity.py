"""A correct export passes every check; whatever is wrong fails the check that is meant for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from quantkit.errors import QuantkitError
from quantkit.evaluate.cost import real_positions
from quantkit.evaluate.exported import load_lowered
from quantkit.evaluate.parity import (
    TOLERANCE,
    LayerParity,
    RunParity,
    WeightParity,
    _compare,
    compare_kept,
    compare_layers,
    compare_runs,
    compare_weights,
)
from quantkit.export.onnx import export_onnx
from quantkit.models.source import open_model
from quantkit.models.trace import trace
from quantkit.prepare import prepare
from quantkit.simulate import fake_quantized
from tests.artefacts import File, plan_traced, random_batches, write_net
from tests.evaluate.conftest import Exported

Get = Callable[[str, str], Exported]
DAMAGED = "encoder.layer.1.output.dense"
# In the first block, so that what is wrong spreads and only its own check may name it.
EARLY = "encoder.layer.0.intermediate.dense"


def silent(done: int, total: int) -> None:
    assert 0 < done <= total


def weights_of(made: Exported, graph: ir.Model) -> WeightParity:
    return compare_weights(graph, made.rows, made.weights, silent)


def layers_of(made: Exported, graph: ir.Model) -> list[LayerParity]:
    return compare_layers(
        made.source, graph, made.rows, made.module, made.weights, made.batches, silent
    )


def runs_of(made: Exported, graph: ir.Model, flipped: int = 0) -> list[RunParity]:
    counts = [flipped] * len(made.batches)
    return compare_runs(
        made.source, graph, made.rows, made.module, made.weights, made.batches, counts, silent
    )


def failed(layers: list[LayerParity]) -> set[str]:
    return {layer["layer"] for layer in layers if not layer["passed"]}


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8", "mxfp8"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_an_untouched_export_passes_every_check_without_a_flipped_code(
    name: str, recipe: str, exported: Get
) -> None:
    made = exported(name, recipe)
    graph = load_lowered(made.file.path)
    weights = weights_of(made, graph)
    assert weights == {
        "checked": len(made.weights),
        "identical": len(made.weights),
        "different": [],
    }
    layers = layers_of(made, graph)
    assert [layer["layer"] for layer in layers] == [row["layer"] for row in made.rows]
    assert not failed(layers)
    assert not any(any(layer["flipped_codes"]) for layer in layers)
    assert all(layer["codes"] > 0 for layer in layers)
    runs = runs_of(made, graph)
    assert [run["input_quantizers"] for run in runs] == [False, True] * 2
    assert {tuple(run["shapes"]["input_ids"]) for run in runs} == {(2, 16), (1, 9)}
    for run in runs:
        for output in run["outputs"]:
            assert output["passed"]
            assert 0 < output["relative_l2"] < TOLERANCE


def test_checking_leaves_the_module_as_it_was(exported: Get) -> None:
    made = exported("bert", "nvfp4")
    before = {name: id(value) for name, value in made.module.named_parameters()}
    graph = load_lowered(made.file.path)
    outputs = list(graph.graph.outputs)
    layers_of(made, graph)
    assert list(graph.graph.outputs) == outputs
    runs_of(made, graph)
    assert {name: id(value) for name, value in made.module.named_parameters()} == before
    assert not any(part._forward_pre_hooks for part in made.module.modules())


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8", "mxfp8"])
def test_one_flipped_bit_of_one_weight_is_found_and_its_layer_named(
    recipe: str, exported: Get, tmp_path: Path
) -> None:
    made = exported("bert", recipe)
    file = made.file.copy_to(tmp_path)
    file.flip_bit(f"{DAMAGED}.weight", byte=37)
    parity = weights_of(made, load_lowered(file.path))
    assert parity["different"] == [DAMAGED]
    assert parity["identical"] == parity["checked"] - 1


def test_one_flipped_bit_of_a_kept_tensor_is_found_though_no_output_shows_it(
    exported: Get, tmp_path: Path
) -> None:
    made = exported("bert", "nvfp4")
    untouched = compare_kept(load_lowered(made.file.path), made.module, made.weights)
    assert untouched["different"] == []
    named = {name for name, _ in made.module.named_parameters()}
    quantized = {made.weights.layer(name).weight for name in made.weights}
    assert untouched["checked"] >= len(named - quantized) - 2  # the pooler of a bare encoder
    file = made.file.copy_to(tmp_path)
    file.flip_bit("embeddings.LayerNorm.bias")
    parity = compare_kept(load_lowered(file.path), made.module, made.weights)
    assert parity["different"] == ["embeddings.LayerNorm.bias"]


def test_a_changed_scale_of_a_weight_is_found(exported: Get, tmp_path: Path) -> None:
    made = exported("bert", "nvfp4")
    for number, name in enumerate((f"{DAMAGED}.weight_scale", f"{DAMAGED}.weight_scale_2")):
        file = made.file.copy_to(tmp_path / str(number))
        file.flip_bit(name)
        assert weights_of(made, load_lowered(file.path))["different"] == [DAMAGED]


def test_a_layer_that_the_file_left_in_float_is_found(exported: Get) -> None:
    made = exported("bert", "nvfp4")
    rows = [row for row in made.rows if row["layer"] != DAMAGED]
    parity = compare_weights(load_lowered(made.file.path), rows, made.weights, silent)
    assert parity["different"] == [DAMAGED]


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_a_wrong_input_scale_fails_its_layers_and_no_other(
    recipe: str, exported: Get, tmp_path: Path
) -> None:
    made = exported("bert", recipe)
    file = made.file.copy_to(tmp_path)
    file.edit(f"{EARLY}.input_scale", lambda scale: scale * 1.3)
    graph = load_lowered(file.path)
    assert weights_of(made, graph)["different"] == []
    assert failed(layers_of(made, graph)) == {EARLY}


def test_siblings_that_share_a_wrong_input_scale_all_fail(exported: Get, tmp_path: Path) -> None:
    made = exported("bert", "nvfp4")
    siblings = {f"encoder.layer.0.attention.self.{part}" for part in ("query", "key", "value")}
    file = made.file.copy_to(tmp_path)
    (scale,) = {f"{name}.input_scale" for name in siblings} & set(file.initializers())
    file.edit(scale, lambda value: value * 1.3)
    assert failed(layers_of(made, load_lowered(file.path))) == siblings


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_wrong_norm_fails_the_outputs_though_weights_and_layers_agree(
    part: str, exported: Get, tmp_path: Path
) -> None:
    made = exported("bert", "nvfp4")
    file = made.file.copy_to(tmp_path)
    file.edit(f"encoder.layer.0.output.LayerNorm.{part}", lambda x: x + np.float32(1e-3))
    graph = load_lowered(file.path)
    assert weights_of(made, graph)["different"] == []
    assert not failed(layers_of(made, graph))
    for run in runs_of(made, graph):
        if not run["input_quantizers"]:
            assert not any(output["passed"] for output in run["outputs"])


def test_a_wrong_bias_of_a_quantized_layer_fails_the_outputs(exported: Get, tmp_path: Path) -> None:
    made = exported("bert", "fp8")
    file = made.file.copy_to(tmp_path)
    file.edit(f"{EARLY}.bias", lambda x: x + np.float32(1e-2))
    runs = runs_of(made, load_lowered(file.path))
    assert not any(run["outputs"][0]["passed"] for run in runs if not run["input_quantizers"])


def test_a_baked_shape_is_an_error_that_names_the_output(exported: Get) -> None:
    """Case C23: the graph is right at the traced shape only."""
    made = exported("bert", "nvfp4")
    graph = load_lowered(made.file.path)
    _bake(graph, "last_hidden_state", 8)
    with pytest.raises(QuantkitError, match=r"output last_hidden_state: .*\(2, 8, 64\)"):
        runs_of(made, graph)


def _bake(model: ir.Model, name: str, length: int) -> None:
    """Cut output `name` to a constant length along axis 1."""
    index = next(i for i, value in enumerate(model.graph.outputs) if value.name == name)
    constants = []
    for role, number in (("start", 0), ("end", length), ("axis", 1)):
        tensor = ir.tensor(np.array([number], np.int64), name=f"bake_{role}")
        constants.append(ir.Value(name=tensor.name, const_value=tensor))
        model.graph.register_initializer(constants[-1])
    node = ir.node("Slice", [model.graph.outputs[index], *constants])
    model.graph.append(node)
    cut = node.outputs[0]
    cut.name, cut.dtype = f"{name}_baked", ir.DataType.FLOAT
    cut.shape = ir.Shape([None, length, None])
    model.graph.outputs[index] = cut


def test_a_lost_output_is_an_error(exported: Get) -> None:
    made = exported("bert", "nvfp4")
    graph = load_lowered(made.file.path)
    del graph.graph.outputs[1]
    with pytest.raises(QuantkitError, match="the model last_hidden_state, pooler_output"):
        runs_of(made, graph)


def test_a_manifest_of_another_graph_is_an_error(exported: Get) -> None:
    made = exported("bert", "nvfp4")
    rows = [{**made.rows[0], "node": "elsewhere"}]
    with pytest.raises(QuantkitError, match=f"{made.rows[0]['layer']}: .*'elsewhere'"):
        compare_weights(load_lowered(made.file.path), rows, made.weights, silent)


def test_nothing_can_flip_in_a_weight_only_model(exported: Get) -> None:
    made = exported("bert", "nvfp4-weight-only")
    layers = layers_of(made, load_lowered(made.file.path))
    assert not any(any(layer["flipped_codes"]) for layer in layers)
    for run in runs_of(made, load_lowered(made.file.path), flipped=1):
        for output in run["outputs"]:
            assert output["passed"]
            # Rounding no input changes nothing, so a claimed flip excuses nothing.
            assert output["tolerance"] == TOLERANCE


def test_flips_are_allowed_what_rounding_the_inputs_does_and_no_more(exported: Get) -> None:
    made = exported("bert", "nvfp4")
    graph = load_lowered(made.file.path)
    with torch.inference_mode():
        inputs = made.batches[0]
        with fake_quantized(made.module, made.weights, inputs=False):
            floating = made.source.call(made.module, inputs)
        with fake_quantized(made.module, made.weights):
            rounded = made.source.call(made.module, inputs)
    runs = runs_of(made, graph, flipped=1)
    for name, output in zip(rounded, runs[1]["outputs"], strict=True):
        before, after = (real_positions(y[name], inputs) for y in (floating, rounded))
        step = (before - after).norm() / after.norm()
        assert output["tolerance"] == pytest.approx(float(step), rel=1e-5)
        assert 1e-3 < output["tolerance"] < 0.5
    assert all(output["tolerance"] == TOLERANCE for output in runs[0]["outputs"])


def test_a_layer_that_runs_twice_is_compared_at_each_use(tmp_path: Path) -> None:
    source = open_model(write_net(tmp_path, loops=2))
    traced = trace(source)
    prepared = prepare(plan_traced(traced, "fp8"), calibration=random_batches(source))
    written = export_onnx(traced, prepared.weights, tmp_path)
    file = File(tmp_path / "model.onnx")
    made = Exported(
        source,
        source.load(),
        prepared.weights,
        written["layers"],
        file,
        [*random_batches(source, 1), {"x": torch.zeros(1, 5, 64)}],
    )
    graph = load_lowered(file.path)
    assert weights_of(made, graph)["different"] == []
    layers = layers_of(made, graph)
    assert [layer["layer"] for layer in layers].count("blocks.0.q") == 2
    assert all(layer["passed"] and not any(layer["flipped_codes"]) for layer in layers)
    for use, name in enumerate(("blocks.0.q", "blocks.0.q_1")):
        damaged = file.copy_to(tmp_path / name)
        damaged.edit(f"{name}.input_scale", lambda scale: scale * 1.3)
        layers = layers_of(made, load_lowered(damaged.path))
        verdicts = [layer["passed"] for layer in layers if layer["layer"] == "blocks.0.q"]
        # On zeros the first use is right whatever its scale; one wrong run is enough to fail.
        assert verdicts == [use != 0, use != 1]


def test_padding_is_not_compared() -> None:
    """What a row without anything to attend to gives is undefined (sliding windows)."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    reference = np.ones((2, 3, 4), np.float32)
    actual = reference.copy()
    actual[0, 2], actual[1, 1:] = 7, np.nan
    run = _compare({"attention_mask": mask}, {"y": actual}, {"y": reference}, None)
    assert run["outputs"][0]["relative_l2"] == 0
    actual[1, 0] = 2
    run = _compare({"attention_mask": mask}, {"y": actual}, {"y": reference}, None)
    assert not run["outputs"][0]["passed"]
