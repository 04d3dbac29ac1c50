"""Running a graph on the CPU, with ONNX Runtime's own optimizer kept from changing its numbers.

QDQPropagationTransformer moves Q/DQ pairs across other operators; together with MatMulAddFusion it
corrupts FP8 graphs (30 % error). Nothing else is switched off.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from quantkit.errors import QuantkitError

DISABLED = ["QDQPropagationTransformer"]
# protobuf refuses messages of 2 GiB; larger models go through a file with external data.
IN_MEMORY_LIMIT = 1 << 30

ERRORS = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


class Session:
    """A model loaded in ONNX Runtime's CPU provider.

    model: a path, or a model in memory (see `lower`). threads: for one operator; by default all.
    Raises QuantkitError when ONNX Runtime cannot load it.
    """

    def __init__(self, model: ir.Model | Path | str, *, threads: int = 0) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        # Open as long as the session, which maps the weights from it.
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        source = self._serialize(model) if isinstance(model, ir.Model) else str(model)
        try:
            self._session = ort.InferenceSession(
                source,
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=DISABLED,
            )
        except ERRORS as error:
            raise QuantkitError(f"ONNX Runtime cannot load the model: {_line(error)}") from error
        self.input_names = [item.name for item in self._session.get_inputs()]
        self.output_names = [item.name for item in self._session.get_outputs()]

    def run(
        self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Run once. feeds: input name -> array, cast to the dtype the graph declares.

        outputs: which to compute; all by default. Inputs the graph does not have are an error, and
        so is a missing one. Raises QuantkitError, with ONNX Runtime's reason, when the run fails.
        """
        known = {item.name: item for item in self._session.get_inputs()}
        if feeds.keys() != known.keys():
            different = sorted(feeds.keys() ^ known.keys())
            raise QuantkitError(
                f"inputs do not fit the model: {', '.join(different)}; it takes {', '.join(known)}"
            )
        arrays: dict[str, NDArray[Any]] = {
            name: np.ascontiguousarray(array.astype(_DTYPES[known[name].type], copy=False))
            for name, array in feeds.items()
        }
        names = list(outputs) if outputs is not None else self.output_names
        try:
            results = self._session.run(names, arrays)
        except ERRORS as error:
            raise QuantkitError(f"ONNX Runtime stopped: {_line(error)}") from error
        return dict(zip(names, results, strict=True))

    def _serialize(self, model: ir.Model) -> bytes | str:
        values = model.graph.initializers.values()
        tensors = [value.const_value for value in values if value.const_value is not None]
        if sum(tensor.nbytes for tensor in tensors) < IN_MEMORY_LIMIT:
            for value in values:
                value.const_value = _in_memory(value.const_value)
            serialized: bytes = ir.to_proto(model).SerializeToString()
            return serialized
        self._folder = tempfile.TemporaryDirectory(prefix="quantkit-")
        path = Path(self._folder.name) / "model.onnx"
        ir.save(model, path, external_data="model.onnx.data", size_threshold_bytes=1024)
        return str(path)


def _in_memory(tensor: ir.TensorProtocol | None) -> ir.TensorProtocol | None:
    """External tensors would be looked for next to a file that does not exist."""
    if isinstance(tensor, ir.ExternalTensor):
        return ir.tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)
    return tensor


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(uint8)": np.uint8,
    "tensor(int8)": np.int8,
    "tensor(bool)": np.bool_,
}
