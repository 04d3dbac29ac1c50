"""Writing: one model file, one data file beside it, never more than one tensor in memory.

Every tensor that is read on demand goes to the data file whatever its size, so that each is made
once, in one pass and in order: a scale written in a later phase than its codes would quantize the
weight a second time. Constants stay in the model file, where shape inference (and TensorRT's
parser) looks at them. External data from the first byte also means that protobuf's 2 GiB limit is
never near.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common

from quantkit.errors import QuantkitError
from quantkit.export.onnx.rewrite import LayerRow

MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
# Eager tensors above this many bytes (position tables, masks) go to the data file as well.
EMBED_LIMIT = 1024

VERSION_KEY = "quantkit.version"
LAYERS_KEY = "quantkit.layers"

# Called with (tensors written, tensors in all).
Progress = Callable[[int, int], None]


def describe(model: ir.Model, rows: Sequence[LayerRow], version: str) -> None:
    """Put into the model what an audit of the file alone needs; take the exporter's traces out.

    The traces are stack frames of the machine that exported, on every node.
    """
    common.ClearMetadataAndDocStringPass()(model)
    for graph in model.graphs():
        for value in (*graph.inputs, *graph.initializers.values(), *_results(graph)):
            value.metadata_props.clear()
    model.producer_name, model.producer_version = "quantkit", version
    model.metadata_props[VERSION_KEY] = version
    model.metadata_props[LAYERS_KEY] = json.dumps(rows, separators=(",", ":"))


def _results(graph: ir.Graph) -> Iterator[ir.Value]:
    return (value for node in graph for value in node.outputs)


def save(model: ir.Model, folder: Path, *, progress: Progress | None = None) -> Path:
    """Write `folder`/model.onnx and model.onnx.data; return the path of the former.

    Peak memory follows the largest tensor. The data file is replaced atomically; the model file
    refers to it by name, so the folder may be moved. `model` keeps its lazy tensors.
    Raises QuantkitError when the disk is full.
    """
    path = folder / MODEL_FILE
    values = [value for value in model.graph.initializers.values() if _is_external(value)]
    tensors = [value.const_value for value in values]

    def report(_: ir.TensorProtocol, info: ir.external_data.CallbackInfo) -> None:
        if progress is not None:
            progress(info.index + 1, info.total)

    try:
        written = ir.external_data.convert_tensors_to_external(
            [tensor for tensor in tensors if tensor is not None], folder, DATA_FILE, report
        )
        for value, tensor in zip(values, written, strict=True):
            value.const_value = tensor
        ir.save(model, path)
    except OSError as error:
        # numpy reports a short write without an errno ("4096 requested and 0 written").
        reason = error.strerror or f"the disk is full, or the file may not grow ({error})"
        raise QuantkitError(
            f"cannot write {path}: {reason}; free space or choose another output"
        ) from error
    finally:
        for value, original in zip(values, tensors, strict=True):
            value.const_value = original
    return path


def _is_external(value: ir.Value) -> bool:
    tensor = value.const_value
    assert tensor is not None
    return isinstance(tensor, ir.LazyTensor) or tensor.nbytes > EMBED_LIMIT


def check(path: Path) -> None:
    """Hold the written file against the ONNX standard: operators, types, declared outputs.

    By path, so that size is no limit. TensorRT's operators are unknown to the checker and to shape
    inference; what their outputs are is taken from the file's own declaration.
    Raises QuantkitError with the checker's reason, or naming an output that is declared in another
    dtype than the graph computes: TensorRT would follow the graph, without a word.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
        computed = _computed_dtypes(onnx.load(path, load_external_data=False))
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise QuantkitError(
            f"the exported graph is not valid ONNX: {' '.join(str(error).split())}; try another "
            "compute dtype, or keep the layer that is named"
        ) from error
    for output in ir.load(path).graph.outputs:
        dtype = computed[_name(output)]
        if dtype not in (output.dtype, ir.DataType.UNDEFINED):
            raise QuantkitError(
                f"{path}: output {output.name!r} is declared {output.dtype} and computed as "
                f"{dtype.name}; the engine would return the latter"
            )


def _computed_dtypes(model: onnx.ModelProto) -> dict[str, ir.DataType]:
    """Output name -> dtype that follows from the operators, whatever the file declares.

    onnx's inference believes the declaration of an output, even where it checks types.
    """
    foreign = {name for node in model.graph.node if node.domain for name in node.output}
    declared = [info for info in model.graph.value_info if info.name in foreign]
    del model.graph.value_info[:]
    model.graph.value_info.extend(declared)
    for output in model.graph.output:
        output.ClearField("type")
    inferred = onnx.shape_inference.infer_shapes(model)
    return {
        output.name: ir.DataType(output.type.tensor_type.elem_type)
        for output in inferred.graph.output
    }


def _name(value: ir.Value) -> str:
    assert value.name is not None
    return value.name
