"""torchao: what its `flatten_tensor_state_dict` would save, made without importing it.

transformers, diffusers and vLLM build each tensor from the metadata of the file; config.json says
again what was done, for those who ask before they load. Written in full into every shard: torchao
merges the metadata of all files and keeps the last list of names.

Static input scales are kept in the metadata only (`models/quantized/record.py`): transformers 5.24
has no name for `_weight_act_per_tensor_scale` and fails to load a file that has one, so torchao
measures its inputs at run time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.export.checkpoint.container import write_safetensors_header
from quantkit.export.checkpoint.target import (
    Content,
    Description,
    Slot,
    Target,
    copy_slot,
    scalar_slot,
)
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.record import write_record
from quantkit.models.quantized.torchao import (
    FLOAT8,
    MX,
    NVFP4,
    PLAIN,
    QDATA,
    SCALE,
    TENSOR_NAMES,
    TENSOR_SCALE,
    swizzled_shape,
)
from quantkit.numerics.formats import FORMATS, BlockFormat
from quantkit.numerics.layouts import to_blocked_128x4
from quantkit.numerics.qtensor import QTensor
from quantkit.recipes.layer import Layer, Scheme

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_ELEMENT = {"mxfp8": "float8_e4m3fn", "mxfp4": "float4_e2m1fn_x2"}
_GRANULARITY: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("PerTensor", {}),
    "fp8_e5m2": ("PerTensor", {}),
    "fp8_channel": ("PerRow", {"dim": -1}),
}
# Chosen by torchao for the hardware it finds itself on.
_KERNEL = {"_type": "KernelPreference", "_data": "AUTO"}


def _slots(layer: QuantizedLayer) -> list[Slot]:
    rows, contraction = layer.shape
    fmt = layer.weight
    packed = fmt.element.bits == 4
    width = contraction // 2 if packed else contraction
    dtype = "U8" if packed else "F8_E5M2" if fmt.element.name == "float8_e5m2" else "F8_E4M3"
    slots = [
        Slot(f"{layer.name}.{QDATA}", dtype, (rows, width), rows * width, _codes, width),
        _scale_slot(layer),
    ]
    if layer.tensor_scale is not None:
        slots.append(scalar_slot(f"{layer.name}.{TENSOR_SCALE}", layer.tensor_scale.multiplier))
    return slots


def _scale_slot(layer: QuantizedLayer) -> Slot:
    name, fmt = f"{layer.name}.{SCALE}", layer.weight
    plain = fmt.scale_shape(layer.shape)
    if fmt.scale.bits == 32:
        nbytes = 4 * plain[0] * plain[1]
        return Slot(name, "F32", plain, nbytes, _scales, 0 if fmt.block[0] is None else 4)
    dtype = "F8_E4M3" if fmt.tensor_scale else "F8_E8M0"
    shape = swizzled_shape(plain)
    # A tile of 128 rows has 32 rows of the stored shape.
    return Slot(name, dtype, shape, shape[0] * shape[1], _swizzled, shape[1] // 4)


def _codes(q: QTensor) -> NDArray[np.uint8]:
    return q.data


def _scales(q: QTensor) -> NDArray[Any]:
    return q.scale


def _swizzled(q: QTensor) -> NDArray[np.uint8]:
    return to_blocked_128x4(q.scale.view(np.uint8))


def _describe(content: Content) -> Description:
    dtype = _dtype_of(content)
    entries: dict[str, Any] = {
        f"{layer.name}.weight": _tensor_entry(layer, dtype) for layer in content.layers.values()
    }
    for name in (*content.plain, *content.made):
        entries[name] = {"_type": PLAIN}
    metadata = {name: json.dumps(entry) for name, entry in entries.items()}
    metadata[TENSOR_NAMES] = json.dumps(list(entries))
    metadata |= write_record(content.layers.values(), divisor=False, holds_inputs=False)
    quantization = {"quant_method": "torchao", **_quantization(content)}
    return Description(
        metadata, {"config.json": {**content.config, "quantization_config": quantization}}
    )


def _dtype_of(content: Content) -> str:
    """What the weights were before, and what torchao computes in: the model's dtype."""
    stated = content.config.get("dtype", content.config.get("torch_dtype"))
    if stated in _DTYPES.values():
        return str(stated)
    sizes: Counter[str] = Counter()
    for info in content.plain.values():
        if info.dtype in _DTYPES:
            sizes[_DTYPES[info.dtype]] += info.nbytes
    return max(sizes, key=lambda name: sizes[name], default="bfloat16")


def _tensor_entry(layer: QuantizedLayer, dtype: str) -> dict[str, Any]:
    """Class and attributes of one tensor, as `TensorSubclassAttributeJSONEncoder` writes them."""
    fmt = layer.weight
    if fmt.tensor_scale:
        inputs = {
            "block_size": fmt.block[1],
            "is_swizzled_scales": True,
            "use_triton_kernel": False,
            "use_dynamic_per_tensor_scale": True,
        }
        data: dict[str, Any] = {
            "is_swizzled_scales": True,
            "use_triton_kernel": False,
            "act_quant_kwargs": _object("QuantizeTensorToNVFP4Kwargs", inputs, layer.input),
            "block_size": fmt.block[1],
            "orig_dtype": _torch_dtype(dtype),
        }
        return _entry(NVFP4, data, ["per_tensor_scale", "qdata", "scale"])
    if fmt.name in _ELEMENT:
        data = {
            "elem_dtype": _torch_dtype(_ELEMENT[fmt.name]),
            "block_size": fmt.block[1],
            "orig_dtype": _torch_dtype(dtype),
            "kernel_preference": _KERNEL,
            "act_quant_kwargs": _object("QuantizeTensorToMXKwargs", _mx_inputs(fmt), layer.input),
            "is_swizzled_scales": True,
        }
        return _entry(MX, data, ["qdata", "scale"])
    block = [size or whole for size, whole in zip(fmt.block, layer.shape, strict=True)]
    data = {
        "block_size": block,
        "mm_config": _object("Float8MMConfig", _MM, layer.input),
        "act_quant_kwargs": _object("QuantizeTensorToFloat8Kwargs", _fp8_inputs(fmt), layer.input),
        "kernel_preference": _KERNEL,
        "dtype": _torch_dtype(dtype),
    }
    return _entry(FLOAT8, data, ["qdata", "scale"])


_MM = {"emulate": False, "use_fast_accum": True, "pad_inner_dim": False}


def _mx_inputs(fmt: BlockFormat) -> dict[str, Any]:
    assert fmt.exponent is not None
    return {
        "elem_dtype": _torch_dtype(_ELEMENT[fmt.name]),
        "block_size": fmt.block[1],
        "scaling_mode": {"_type": "ScaleCalculationMode", "_data": fmt.exponent.upper()},
        "kernel_preference": _KERNEL,
        "is_swizzled_scales": True,
    }


def _fp8_inputs(fmt: BlockFormat) -> dict[str, Any]:
    return {
        "float8_dtype": _torch_dtype(fmt.element.name),
        "granularity": _granularity(fmt),
        "mm_config": None,
        "hp_value_lb": None,
        "hp_value_ub": None,
        "kernel_preference": _KERNEL,
    }


def _granularity(fmt: BlockFormat) -> dict[str, Any]:
    kind, data = _GRANULARITY[fmt.name]
    return {"_type": kind, "_data": data}


def _torch_dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def _object(kind: str, data: Mapping[str, Any], used: object) -> dict[str, Any] | None:
    return None if used is None else {"_type": kind, "_data": dict(data)}


def _entry(kind: str, data: Mapping[str, Any], tensors: list[str]) -> dict[str, Any]:
    return {"_type": kind, "_data": dict(data), "_tensor_data_names": tensors}


def _quantization(content: Content) -> dict[str, Any]:
    """What config.json says: the scheme of most layers, then those that differ, by exact name.

    In diffusers a kept `proj_out` in `modules_to_not_convert` also means every block's `proj_out`,
    so its models get exact names. vLLM fuses layers and knows few of the names, hence the default.
    """
    counts = Counter(layer.scheme for layer in content.layers.values())
    usual = max(counts, key=lambda scheme: counts[scheme], default=("nvfp4", None))
    default = _config(usual)
    names: dict[str, Any] = dict.fromkeys(content.kept)
    names |= {n: _config(layer.scheme) for n, layer in content.layers.items()}
    names = {name: config for name, config in names.items() if config != default}
    if all(config is None for config in names.values()) and "_class_name" not in content.config:
        return {"quant_type": {"default": default}, "modules_to_not_convert": list(names) or None}
    if names:
        by_name = {"fqn_to_config": names | {"_default": default}}
        default = {"_type": "FqnToConfig", "_version": 1, "_data": by_name}
    return {"quant_type": {"default": default}}


def _config(scheme: tuple[str, str | None]) -> dict[str, Any]:
    """The torchao configuration that would have made a layer of this scheme."""
    fmt, inputs = FORMATS[scheme[0]], scheme[1]
    version, data = 1, dict[str, Any]()
    if fmt.tensor_scale and inputs is None:
        kind = "NVFP4WeightOnlyConfig"
        data = {"use_dynamic_per_tensor_scale": True}
    elif fmt.tensor_scale:
        kind = "NVFP4DynamicActivationNVFP4WeightConfig"
        data = {"use_triton_kernel": False, "use_dynamic_per_tensor_scale": True}
    elif fmt.name in _ELEMENT:
        kind = "MXDynamicActivationMXWeightConfig"
        kwargs = _mx_inputs(fmt)
        data = {
            "activation_dtype": kwargs["elem_dtype"],
            "weight_dtype": kwargs["elem_dtype"],
            "kernel_preference": _KERNEL,
            "scaling_mode": kwargs["scaling_mode"],
        }
    else:
        version = 2
        granularity = {"_version": 1, **_granularity(fmt)}
        if inputs is None:
            kind = "Float8WeightOnlyConfig"
            data = {"weight_dtype": _torch_dtype(fmt.element.name), "granularity": granularity}
        else:
            kind = "Float8DynamicActivationFloat8WeightConfig"
            data = {"granularity": [granularity, granularity]}
    return {"_type": kind, "_version": version, "_data": data}


def _obstacle(layer: Layer, scheme: Scheme) -> str | None:
    """What torchao, or transformers with torchao, cannot load."""
    if EXPERTS in layer.name:
        return "transformers stacks the experts of a layer, and has no stack of torchao tensors"
    if scheme.weight.tensor_scale and any(size % 16 for size in layer.shape):
        return f"torchao's NVFP4 needs both sides in multiples of 16, not {layer.shape}"
    return None


EXPERTS = ".experts."

TARGET = Target(
    "torchao",
    "torchao tensors in safetensors, for transformers, diffusers and vLLM",
    holds=frozenset(
        {
            ("nvfp4", None),
            ("nvfp4", "nvfp4"),
            ("mxfp8", "mxfp8"),
            ("mxfp4", "mxfp4"),
            ("fp8", None),
            ("fp8", "fp8"),
            ("fp8_channel", None),
            ("fp8_channel", "fp8_channel"),
            ("fp8_e5m2", None),
        }
    ),
    input_scales="none",
    slots=_slots,
    describe=_describe,
    recipes={"fp8": "fp8-dynamic"},
    write_header=write_safetensors_header,
    keep=lambda info: [copy_slot(info)],
    obstacle=_obstacle,
)
