"""Asked against realised: does each layer of the engine run in the format it was exported for?

A build that succeeds proves nothing: TensorRT accepts FP4 and FP8 graphs and then, without a
warning, computes in BF16 (NVIDIA/TensorRT #4833, #4590, #4516). What it decided is written in the
engine, so it is read there (plan.py): the operand types of the GEMM that carries the layer's ONNX
node. Kernel names and file sizes were refused as evidence; both look the same either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quantkit.engines.graph import AskedLayer, load_graph
from quantkit.engines.plan import Op, Plan, read_plan
from quantkit.errors import QuantkitError

Status = Literal["ok", "mismatch", "emulated", "missing", "unknown"]

REALISED_BY = {
    "nvfp4": "fp4_e2m1",
    "mxfp4": "fp4_e2m1",
    "mxfp8": "fp8_e4m3",
    "fp8": "fp8_e4m3",
    "int4": "int4",
    "int8": "int8",
}
"""Format family -> the type its operands have in a compiled program."""

_EMULATED = ("mxfp4", "mxfp8", "fp8-dynamic")
_GEMMS = ("fully_connected", "corrltn", "deconv")


@dataclass(frozen=True, slots=True)
class LayerAudit:
    """One layer. asked: scheme in words; realised: what the engine does instead or as well.

    operands: types of the two GEMM operands, as the engine's compiler spells them. status: "ok";
    "mismatch", computed in another format; "emulated", stored narrow but computed in high
    precision, as the format always is on this hardware; "missing", no kernel carries the node;
    "unknown", the engine could not be read. fused_with: other asked layers in the same GEMM.
    """

    layer: str
    node: str
    asked: str
    realised: str
    operands: tuple[str, ...]
    status: Status
    fused_with: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A row of audit.json."""
        return {
            "layer": self.layer,
            "node": self.node,
            "asked": self.asked,
            "realised": self.realised,
            "operands": list(self.operands),
            "status": self.status,
            "fused_with": list(self.fused_with),
        }


@dataclass(frozen=True, slots=True)
class Audit:
    """The verdict on one engine. problem: why it could not be read, None when it was.

    constants: weight bytes per dtype. device_memory: bytes of activations and scratch space.
    """

    engine: str
    runtime_version: str
    targets: tuple[str, ...]
    layers: tuple[LayerAudit, ...]
    constants: Mapping[str, int]
    device_memory: int
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """Every layer is realised as asked, or emulated as its format must be."""
        return not self.count("mismatch", "missing", "unknown")

    def count(self, *statuses: Status) -> int:
        """Number of layers with one of these statuses."""
        return sum(layer.status in statuses for layer in self.layers)

    @property
    def headline(self) -> str:
        """The answer in one line, such as "7/10 layers run as asked (3 mismatch)"."""
        if self.problem is not None:
            return f"not audited: {self.problem}"
        others = [
            f"{self.count(status)} {status}"
            for status in ("mismatch", "missing", "emulated")
            if self.count(status)
        ]
        note = f" ({', '.join(others)})" if others else ""
        return f"{self.count('ok')}/{len(self.layers)} layers run as asked{note}"

    def to_json(self) -> dict[str, Any]:
        """The content of audit.json."""
        return {
            "engine": self.engine,
            "runtime_version": self.runtime_version,
            "targets": list(self.targets),
            "understood": self.problem is None,
            "problem": self.problem,
            "passed": self.passed,
            "headline": self.headline,
            "summary": {
                "asked": len(self.layers),
                "realised": self.count("ok"),
                "emulated": self.count("emulated"),
                "mismatched": self.count("mismatch", "missing", "unknown"),
            },
            "layers": [layer.to_json() for layer in self.layers],
            "constants": dict(self.constants),
            "device_memory": self.device_memory,
        }


def audit(engine: Path | str, onnx: Path | str) -> Audit:
    """Compare the layers that `onnx` asks for with the kernels of `engine`, which was built of it.

    Needs no GPU and no TensorRT. Raises QuantkitError for a file that is missing or damaged, and
    when the ONNX file asks for no low-precision layer at all.
    """
    engine, onnx = Path(engine), Path(onnx)
    asked = load_graph(onnx).asked
    if not asked:
        raise QuantkitError(
            f"{onnx}: no layer of this model is quantized, so there is nothing to audit; "
            "export it with --fp4 or --fp8"
        )
    plan = read_plan(engine)
    return Audit(
        engine=engine.name,
        runtime_version=plan.runtime_version,
        targets=plan.targets,
        layers=tuple(_audit_layers(asked, plan)),
        constants=plan.constants,
        device_memory=plan.device_memory,
        problem=plan.problem,
    )


def _audit_layers(asked: Sequence[AskedLayer], plan: Plan) -> Iterable[LayerAudit]:
    carriers: dict[str, list[Op]] = {}
    for program in plan.programs:
        for op in program.ops:
            for node in op.layers:
                carriers.setdefault(node, []).append(op)
    names = {layer.node: layer.layer for layer in asked}
    for layer in asked:
        ops = _kernels(layer.node, carriers.get(layer.node, ()))
        verdicts = [_judge(layer, op) for op in ops]
        # One engine may hold a layer several times, once per profile: the worst one counts.
        status, realised, operands = max(
            verdicts,
            key=lambda verdict: ("ok", "emulated", "mismatch").index(verdict[0]),
            default=_absent(plan),
        )
        siblings = {node for op in ops for node in op.layers if node != layer.node}
        yield LayerAudit(
            layer.layer,
            layer.node,
            layer.scheme,
            realised,
            operands,
            status,
            tuple(sorted(names[node] for node in siblings if node in names)),
        )


_Verdict = tuple[Status, str, tuple[str, ...]]


def _absent(plan: Plan) -> _Verdict:
    if plan.problem is not None:
        return "unknown", "not known", ()
    return "missing", "no kernel carries this layer", ()


def _kernels(node: str, carriers: Sequence[Op]) -> list[Op]:
    """The kernels that do the multiplication of `node`.

    Kernels around it, such as the one that pads block scales, list the node too. A matrix times
    a vector may be a plain kernel: then those are all there is.
    """
    gemms = [op for op in carriers if (gemm := _gemm(op, node)) and node in gemm.layers]
    return gemms or [op for op in carriers if _gemm(op, node)] or list(carriers)


def _gemm(op: Op, node: str) -> Op | None:
    """The matrix multiplication inside a kernel, seeing through fused ones."""
    if op.kind in _GEMMS or "mha" in op.name:
        return op
    inner = [o for o in op.fused.ops if o.kind in _GEMMS] if op.fused is not None else []
    return next((o for o in inner if node in o.layers), inner[0] if len(inner) == 1 else None)


def _judge(layer: AskedLayer, op: Op) -> _Verdict:
    gemm = _gemm(op, layer.node)
    read = {tensor.dtype for tensor in op.inputs}
    operands = tuple(tensor.dtype for tensor in (gemm or op).inputs[:2])
    result = op.outputs[0].dtype if op.outputs else "nothing"
    realised = f"{' x '.join(operands)} -> {result}"
    scheme = layer.scheme
    narrow = REALISED_BY.get(scheme.removesuffix("-weight-only").removesuffix("-dynamic"))
    if scheme.endswith("-weight-only"):
        # MX scales are expanded to the size of the weight: that kernel reads more, not less.
        if narrow in read and gemm is not op and not scheme.startswith("mx"):
            return "ok", f"{realised}, {narrow} weight read by the kernel", operands
        return "emulated", f"{realised}, weight expanded before it", operands
    real = narrow is not None and operands == (narrow, narrow)
    if scheme.startswith("mx"):
        real = real and "fp8_e8m0" in read
    if real:
        return "ok", realised, operands
    return "emulated" if scheme in _EMULATED else "mismatch", realised, operands
