"""The exported graph read back, lowered and run; what parity compares with the module.

Layers are found by the names that the export recorded, values by the names of the file, so a graph
that was changed after its export shows as different or does not fit its manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from numpy.typing import NDArray
from torch import Tensor

from quantkit.engines.external import check_external_data
from quantkit.engines.graph import load_graph
from quantkit.engines.lower import lower
from quantkit.engines.onnxruntime import Session
from quantkit.errors import QuantkitError
from quantkit.models.tensors import to_numpy

Arrays = dict[str, NDArray[Any]]
Rows = Sequence[Mapping[str, Any]]
Batches = Sequence[Mapping[str, Tensor]]


def load_lowered(path: Path) -> ir.Model:
    """The exported graph, in operators that run on a CPU; weights stay on disk until used.

    Raises QuantkitError when the file or its weights are missing, cut short, or not ONNX.
    """
    check_external_data(load_graph(path).model, path)
    return lower(path)


def find_nodes(model: ir.Model, rows: Rows) -> list[ir.Node]:
    """The MatMul or Gemm of each row, the `export.layers` of a manifest."""
    nodes = {node.name: node for node in model.graph}
    for row in rows:
        if row["node"] not in nodes:
            raise QuantkitError(
                f"{row['layer']}: the graph has no node {row['node']!r}, which its manifest names; "
                "the two do not belong together, export again"
            )
    return [nodes[str(row["node"])] for row in rows]


def run_graph(model: ir.Model, batches: Batches) -> list[Arrays]:
    """Outputs of the graph for each of the inputs."""
    session = Session(model)
    return [session.run(feeds_for(session, inputs)) for inputs in batches]


def feeds_for(session: Session, inputs: Mapping[str, Tensor]) -> Arrays:
    """The inputs under the graph's names; a graph may have dropped one that it does not use."""
    plain = {name.replace(".", "_"): to_numpy(value) for name, value in inputs.items()}
    missing = [name for name in session.input_names if name not in plain]
    if missing:
        raise QuantkitError(
            f"the graph takes inputs {', '.join(missing)}, the model has {', '.join(plain)}"
        )
    return {name: plain[name] for name in session.input_names}


def bypass_input_quantizers(model: ir.Model, rows: Rows) -> ir.Model:
    """The lowered graph with float inputs to every quantized matmul, changed in place.

    Nothing can flip in it, so it must equal the module to float32 accuracy on any data.
    """
    values = named_values(model)
    for row, node in zip(rows, find_nodes(model, rows), strict=True):
        x, quantized = values[str(row["input"])], node.inputs[0]
        assert quantized is not None
        assert quantized.shape is not None
        assert x.shape is not None
        if len(quantized.shape) != len(x.shape):
            flat = ir.tensor(
                np.array([-1, quantized.shape[-1]], np.int64), name=f"{row['node']}/2d"
            )
            target = ir.Value(name=flat.name, const_value=flat)
            model.graph.register_initializer(target)
            reshape = ir.node("Reshape", [x, target])
            model.graph.insert_before(node, reshape)
            x = reshape.outputs[0]
        node.replace_input_with(0, x)
    common.RemoveUnusedNodesPass()(model)
    return model


def named_values(model: ir.Model) -> dict[str, ir.Value]:
    """Inputs of the graph and results of its nodes, by name."""
    results = (value for node in model.graph for value in node.outputs)
    return {str(value.name): value for value in (*model.graph.inputs, *results)}
