"""Experts stacked in one tensor: each becomes a layer of its own, with the place it lies at.

Runtimes load quantized experts one by one, `experts.{e}.gate_proj`, `up_proj`, `down_proj` (as
llm-compressor writes and vLLM reads them), so a stack is cut by its expert axis, and gate and up
apart. How a stack is stored is read from its shapes: gate-up is [E, 2I, H] next to a down of
[E, H, I], or both the other way round, and the two cannot be mistaken for each other. Where shapes
leave a choice, nothing is cut: the stack is listed as a bare parameter, and kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.models.checkpoint import TensorInfo
from quantkit.models.headers.names import FLOATS, find_sizes
from quantkit.models.headers.place import Place

PARTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
BIAS = "_bias"
Slice = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Expert:
    """One projection of one expert.

    name: of the layer it becomes. shape: (N, K). place: of its weight. bias: place of its bias,
    seen as a matrix of one row; None without.
    """

    name: str
    shape: tuple[int, int]
    place: Place
    bias: Place | None


def find_experts(
    infos: Mapping[str, TensorInfo], config: Mapping[str, Any], model_class: str | None = None
) -> list[Expert]:
    """Every expert of every stack whose storage is certain, in the order expert, projection."""
    stacks: dict[str, dict[str, TensorInfo]] = {}
    for key, info in infos.items():
        module, _, part = key.removesuffix(".weight").rpartition(".")
        if part in PARTS and len(info.shape) == 3 and info.dtype in FLOATS:
            stacks.setdefault(module, {})[part] = info
    found: list[Expert] = []
    # gpt-oss alternates the columns of gate and up; nothing in the shapes says so.
    interleaved = config.get("model_type") == "gpt_oss" or "GptOss" in (model_class or "")
    for module, stack in stacks.items():
        if module.rpartition(".")[2] != "experts":
            continue
        transposed = _is_transposed(module, stack, infos, config)
        # Alternating rows would be a place of single rows; nobody stores experts so.
        if transposed is not None and (transposed or not interleaved):
            cut = _cut(module, stack, infos, transposed, interleaved)
            if not any(f"{expert.name}.weight" in infos for expert in cut):
                found += cut
    return found


def _is_transposed(
    module: str,
    stack: Mapping[str, TensorInfo],
    infos: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
) -> bool | None:
    """Whether experts are stored [K, N]; None when it cannot be known, or they do not fit."""
    if len({info.shape[0] for info in stack.values()}) != 1 or "down_proj" not in stack:
        return None
    if not all(stack["down_proj"].shape):
        return None
    fused = "gate_up_proj" in stack
    if fused == bool({"gate_proj", "up_proj"} & stack.keys()):
        return None
    down = stack["down_proj"].shape[1:]
    answers = set()
    for part in stack.keys() - {"down_proj"}:
        wide = 2 if fused else 1
        up = stack[part].shape[1:]
        answers.add(
            (
                up == (wide * down[1], down[0]),  # [wide I, H] and [H, I]
                up == (down[1], wide * down[0]),  # [H, wide I] and [I, H]
            )
        )
    if len(answers) != 1:
        return None
    plain, transposed = answers.pop()
    if plain != transposed:
        return transposed
    hidden = _hidden_sizes(module, infos, config)
    if not plain or (down[0] in hidden) == (down[1] in hidden):
        return None
    return down[1] in hidden


def _hidden_sizes(
    module: str, infos: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> frozenset[int]:
    """Width of the tokens: that of the router beside the experts, else what the config says."""
    owner = module.rpartition(".")[0]
    for router in ("gate.weight", "router.weight"):
        info = infos.get(f"{owner}.{router}")
        if info is not None and len(info.shape) == 2:
            return frozenset({info.shape[1]})
    return find_sizes(config, "hidden_size")


def _cut(
    module: str,
    stack: Mapping[str, TensorInfo],
    infos: Mapping[str, TensorInfo],
    transposed: bool,
    interleaved: bool,
) -> list[Expert]:
    return [
        _place(f"{module}.{expert}.{name}", stack[part], bias, expert, outputs, transposed)
        for expert in range(stack["down_proj"].shape[0])
        for part in PARTS
        if part in stack
        for bias in (infos.get(f"{module}.{part}{BIAS}"),)
        for name, outputs in _outputs(part, stack[part].shape[2 if transposed else 1], interleaved)
    ]


def _outputs(part: str, count: int, interleaved: bool) -> list[tuple[str, Slice]]:
    """The projections in a part, and which of its outputs (axis N) are theirs."""
    if part != "gate_up_proj":
        return [(part, (0, count, 1))]
    half = count // 2
    if interleaved:
        return [("gate_proj", (0, count, 2)), ("up_proj", (1, count, 2))]
    return [("gate_proj", (0, half, 1)), ("up_proj", (half, count, 1))]


def _place(
    name: str,
    info: TensorInfo,
    bias: TensorInfo | None,
    expert: int,
    outputs: Slice,
    transposed: bool,
) -> Expert:
    _, rows, columns = info.shape
    start, stop, step = outputs
    first = expert * rows
    if transposed:
        whole = outputs == (0, columns, 1)
        place = Place(info.name, first, first + rows, True, None if whole else outputs)
    else:
        place = Place(info.name, first + start, first + stop)
    row = None if bias is None else Place(bias.name, expert, expert + 1, columns=outputs)
    shape = (len(range(start, stop, step)), rows if transposed else columns)
    return Expert(name, shape, place, row)
