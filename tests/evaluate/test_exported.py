"""The file that was written, read back and run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from quantkit.engines.onnxruntime import Session
from quantkit.errors import QuantkitError
from quantkit.evaluate.exported import (
    bypass_input_quantizers,
    feeds_for,
    find_nodes,
    load_lowered,
    run_graph,
)
from tests.evaluate.conftest import Exported

Get = Callable[[str, str], Exported]


def test_a_missing_or_broken_file_is_one_clear_line(exported: Get, tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match=r"model\.onnx: no such ONNX file"):
        load_lowered(tmp_path / "model.onnx")
    file = exported("bert", "nvfp4").file.copy_to(tmp_path)
    data = file.path.with_name("model.onnx.data")
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    with pytest.raises(QuantkitError, match="cut short"):
        load_lowered(file.path)
    data.unlink()
    with pytest.raises(QuantkitError, match="missing"):
        load_lowered(file.path)
    file.path.write_bytes(b"no protobuf")
    with pytest.raises(QuantkitError, match="not an ONNX model"):
        load_lowered(file.path)


def test_nodes_are_found_by_the_names_that_the_export_recorded(exported: Get) -> None:
    made = exported("bert", "nvfp4")
    nodes = find_nodes(load_lowered(made.file.path), made.rows)
    assert [node.name for node in nodes] == [row["node"] for row in made.rows]
    assert {node.op_type for node in nodes} <= {"MatMul", "Gemm"}


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8", "mxfp8"])
def test_without_its_quantizers_the_graph_computes_with_float_inputs(
    recipe: str, exported: Get
) -> None:
    made = exported("bert", recipe)
    graph = load_lowered(made.file.path)
    before = run_graph(graph, made.batches)
    after = run_graph(bypass_input_quantizers(graph, made.rows), made.batches)
    operators = {node.op_type for node in graph.graph}
    assert not operators & {"QuantizeLinear", "DequantizeLinear", "RoundToE2M1"}
    for quantized, floating in zip(before, after, strict=True):
        for name, value in quantized.items():
            difference = np.linalg.norm(floating[name] - value) / np.linalg.norm(value)
            assert 3e-4 < difference < 0.5


def test_inputs_go_by_the_graphs_names_and_a_missing_one_is_named(exported: Get) -> None:
    made = exported("bert", "nvfp4")
    session = Session(load_lowered(made.file.path))
    feeds = feeds_for(session, made.batches[0] | {"unused.by.the.graph": torch.ones(1)})
    assert list(feeds) == session.input_names
    with pytest.raises(QuantkitError, match="attention_mask"):
        feeds_for(session, {"input_ids": made.batches[0]["input_ids"]})
