"""DeepSeek's FP8: a scale per block of 128 x 128, as transformers' `fp8` method reads it.

`.weight` E4M3 [N, K] and `.weight_scale_inv` [ceil(N / 128), ceil(K / 128)], float32 or bfloat16,
which MULTIPLIES in spite of its name; the last block of an axis may be short. Inputs are quantized
at run time, per row and 128 elements. Other block sizes, scales stored as exponents and FP4 experts
are other formats under the same names: refused, not guessed.

Source: DeepSeek-V3's `fp8_cast_bf16.py`; transformers 5.24, `integrations/finegrained_fp8.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.layout import Config, Layout
from quantkit.models.quantized.stored import FLOAT_SCALES, Stored, require, require_matrix
from quantkit.numerics.formats import get_format

METHOD = "fp8"
WEIGHT, SCALE = ".weight", ".weight_scale_inv"
BLOCK = [128, 128]


def _settings(config: Config) -> Mapping[str, Any]:
    for holder in (config, config.get("text_config")):
        found = holder.get("quantization_config") if isinstance(holder, Mapping) else None
        if isinstance(found, Mapping):
            return found
    return {}


def _recognise(checkpoint: Checkpoint, config: Config) -> bool:
    return _settings(config).get("quant_method", METHOD) == METHOD and any(
        name.endswith(SCALE) for name in checkpoint.infos
    )


def _layers(checkpoint: Checkpoint, config: Config) -> dict[str, QuantizedLayer]:
    quantization = _settings(config)
    for setting, known in (
        ("weight_block_size", BLOCK),
        ("activation_scheme", "dynamic"),
        ("fmt", "e4m3"),
    ):
        if quantization.get(setting, known) != known:
            raise QuantkitError(
                f"{checkpoint.path}: quantization_config has {setting} {quantization[setting]!r}; "
                f"quantkit reads {known!r}; start from the original model"
            )
    fmt, activation = get_format("fp8_block"), get_format("fp8_group")
    layers = {}
    for key in checkpoint.infos:
        if not key.endswith(SCALE):
            continue
        name = key.removesuffix(SCALE)
        shape = require_matrix(checkpoint, name + WEIGHT, fmt, ("F8_E4M3",))
        what = f"a {fmt.name} weight of shape {list(shape)}"
        require(checkpoint, key, what, FLOAT_SCALES, (fmt.scale_shape(shape),))
        stored = Stored(checkpoint, fmt, name, shape, name + WEIGHT, key)
        layers[name] = QuantizedLayer(
            name, shape, fmt, activation, stored.rows, keys=(name + WEIGHT, key)
        )
    return layers


LAYOUT = Layout(
    "deepseek", "FP8 in blocks of 128 x 128 (DeepSeek, transformers fp8)", _recognise, _layers
)
