"""The scale of every module as peft's configuration states it, and what it says that is no LoRA.

peft keeps alpha and rank out of the tensors, in adapter_config.json or, for diffusers, in the
safetensors metadata. The rules (patterns, rank-stabilized scales) are peft's own and few, so they
are written here; importing peft for them would bring torch into the streaming path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.models.strict_json import parse_json, show

METADATA = "lora_adapter_metadata"

# Setting -> what it makes of the adapter. Any value but None, False or empty counts.
REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA, which also rescales every row of the weight",
    "use_qalora": "QA-LoRA, which pools the layer's input",
    "alora_invocation_tokens": "activated LoRA, which changes some tokens only",
    "use_bdlora": "block-diagonal LoRA",
    "kasa_config": "KaSA, which also truncates the weight",
    "arrow_config": "Arrow, a router over several adapters",
    "layer_replication": "a model with replicated layers",
    "trainable_token_indices": "single rows of an embedding",
    "megatron_config": "a Megatron adapter",
}
# Ways to start the training from a base weight that was changed too.
CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What a peft configuration says of scales and shapes.

    rank, alpha: of a module that no pattern names. rank_pattern, alpha_pattern: regular expression
    for the end of a module's name -> value. rslora: alpha is divided by the square root of the
    rank. fan_in_fan_out: the weights are stored [in, out]. parameters: target_parameters, the names
    of 3-D expert weights.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, float]
    alpha_pattern: Mapping[str, float]
    rslora: bool
    fan_in_fan_out: bool
    parameters: tuple[str, ...]

    def find_rank(self, module: str) -> int:
        """The rank of a module, by its dotted name in the model."""
        return int(_look_up(self.rank_pattern, module, self.rank))

    def find_scale(self, module: str) -> float:
        """What the product of a module's two matrices is multiplied with."""
        rank = self.find_rank(module)
        alpha = _look_up(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def read_config(content: object, where: str) -> PeftConfig:
    """The settings of an adapter_config.json. where: its path, for errors.

    Raises QuantkitError for an adapter of another kind and for a setting that makes the change more
    than a product of two matrices.
    """
    if not isinstance(content, dict):
        raise QuantkitError(f"{where}: not a JSON object.")
    kind = content.get("peft_type", "LORA")
    if kind != "LORA":
        raise QuantkitError(f"{where}: peft_type is {show(kind)}; only LORA can be merged.")
    for setting, method in REFUSED.items():
        if content.get(setting):
            raise QuantkitError(
                f"{where}: {setting} is set: this is {method}. Merge it with peft "
                "(merge_and_unload) and give quantkit the merged model."
            )
    started = str(content.get("init_lora_weights", "")).lower()
    if started.startswith(CHANGES_BASE):
        raise QuantkitError(
            f"{where}: init_lora_weights is {show(started)}, so the adapter belongs to base "
            "weights that were changed too. Save it with save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...)."
        )
    patterns = {
        name: _read_pattern(content.get(name) or {}, f"{where}: {name}")
        for name in ("rank_pattern", "alpha_pattern")
    }
    parameters = content.get("target_parameters") or []
    return PeftConfig(
        rank=int(_read_number(content.get("r", 8), f"{where}: r", 1)),
        alpha=_read_number(content.get("lora_alpha", 8), f"{where}: lora_alpha"),
        rank_pattern=patterns["rank_pattern"],
        alpha_pattern=patterns["alpha_pattern"],
        rslora=bool(content.get("use_rslora")),
        fan_in_fan_out=bool(content.get("fan_in_fan_out")),
        parameters=tuple(str(name) for name in parameters),
    )


def read_metadata(text: str, where: str) -> dict[str, PeftConfig]:
    """Component -> settings, from the metadata that diffusers writes into a safetensors file.

    diffusers puts "transformer." or "text_encoder." before every setting, or nothing. The denoiser
    is component "", as in `keys`.
    """
    where = f"{where}: metadata {METADATA}"
    content = parse_json(text.encode(), where)
    if not isinstance(content, dict):
        raise QuantkitError(f"{where}: not a JSON object.")
    parts: dict[str, dict[str, Any]] = {}
    for name, value in content.items():
        owner, _, setting = name.rpartition(".")
        parts.setdefault(owner if owner.startswith("text_encoder") else "", {})[setting] = value
    return {owner: read_config(settings, where) for owner, settings in parts.items()}


def _look_up(pattern: Mapping[str, float], module: str, default: float) -> float:
    for expression, value in pattern.items():
        if re.match(rf"(.*\.)?({expression})$", module):
            return value
    return default


def _read_pattern(content: object, where: str) -> Mapping[str, float]:
    if not isinstance(content, dict):
        raise QuantkitError(f"{where} must map module names to numbers, not be {show(content)}.")
    for expression in content:
        try:
            re.compile(expression)
        except re.error as error:
            raise QuantkitError(
                f"{where}: {show(expression)} is no regular expression ({error})."
            ) from error
    least = 1 if where.endswith("rank_pattern") else -math.inf
    return {k: _read_number(v, f"{where}[{show(k)}]", least) for k, v in content.items()}


def _read_number(value: object, where: str, least: float = -math.inf) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value < least
    ):
        wanted = "a finite number" if least == -math.inf else f"a number from {least:g} up"
        raise QuantkitError(f"{where} is {show(value)}, it must be {wanted}.")
    return float(value)
