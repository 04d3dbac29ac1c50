"""Stacked experts: which projection lies where, and when that is not certain.

The oracle is transformers' own arithmetic: a token through one expert of its module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quantkit.models.checkpoint import Checkpoint
from quantkit.models.headers import describe_headers, read_place
from quantkit.models.headers.experts import find_experts
from tests.models.headers.golden import infos_of

PATH = "model.layers.0.mlp.experts"
E, H, INNER = 3, 8, 5


def stacks(gate_up: tuple[int, int], down: tuple[int, int]) -> dict[str, list[int]]:
    return {f"{PATH}.gate_up_proj": [E, *gate_up], f"{PATH}.down_proj": [E, *down]}


def names(shapes: dict[str, list[int]], config: dict[str, Any] | None = None) -> list[str]:
    return [expert.name for expert in find_experts(infos_of(shapes), config or {})]


ALL = [f"{PATH}.{e}.{part}_proj" for e in range(E) for part in ("gate", "up", "down")]


def test_both_ways_to_store_a_stack_are_told_apart_by_shapes_alone() -> None:
    for transposed in (False, True):
        shapes = (2 * INNER, H), (H, INNER)
        found = find_experts(infos_of(stacks(*(s[::-1] if transposed else s for s in shapes))), {})
        assert [expert.name for expert in found] == ALL
        assert {expert.place.transposed for expert in found} == {transposed}
        assert {e.name.rpartition(".")[2]: e.shape for e in found} == {
            "gate_proj": (INNER, H),
            "up_proj": (INNER, H),
            "down_proj": (H, INNER),
        }


def test_square_experts_still_have_an_oblong_gate_up() -> None:
    """gpt-oss has H = I = 2880: its down projection is square, its gate-up is not."""
    assert names(stacks((2 * H, H), (H, H))) == ALL
    assert names(stacks((H, 2 * H), (H, H))) == ALL


@pytest.mark.parametrize(
    "shapes",
    [
        stacks((2 * INNER, H), (INNER, H)),  # not the same way round
        stacks((3 * INNER, H), (H, INNER)),
        {f"{PATH}.gate_up_proj": [E, 2 * INNER, H]},
        {f"{PATH}.down_proj": [E, H, INNER]},
        {f"{PATH}.gate_up_proj": [E, 2 * INNER, H], f"{PATH}.down_proj": [E + 1, H, INNER]},
        stacks((0, H), (H, 0)),
        {key.replace("experts", "shared"): s for key, s in stacks((10, H), (H, 5)).items()},
        stacks((2 * INNER, H), (H, INNER)) | {f"{PATH}.1.up_proj.weight": [INNER, H]},
    ],
)
def test_whatever_does_not_fit_is_left_whole_and_listed(shapes: dict[str, list[int]]) -> None:
    """C13: a bare parameter that is kept, never a guess and never silence."""
    assert names(shapes) == []
    listed = {layer.name: layer for layer in describe_headers(infos_of(shapes), {}).layers}
    for key in shapes:
        if not key.endswith(".weight"):
            assert (listed[key].type, listed[key].op) == ("Parameter", "other")


def test_experts_without_a_gate_need_to_know_the_width_of_tokens() -> None:
    """up [E, I, H] and down [E, H, I] read the same both ways round (Nemotron-H)."""
    shapes = {f"{PATH}.up_proj": [E, INNER, H], f"{PATH}.down_proj": [E, H, INNER]}
    assert names(shapes) == []
    by_config = find_experts(infos_of(shapes), {"text_config": {"hidden_size": H}})
    by_router = find_experts(infos_of(shapes | {"model.layers.0.mlp.gate.weight": [E, H]}), {})
    assert [e.name.rpartition(".")[2] for e in by_config] == ["up_proj", "down_proj"] * E
    assert by_config == by_router
    assert not any(expert.place.transposed for expert in by_config)
    turned = find_experts(infos_of(shapes), {"hidden_size": INNER})
    assert all(expert.place.transposed for expert in turned)
    assert names(shapes, {"hidden_size": H, "part": {"hidden_size": INNER}}) == []


def test_layers_of_experts_have_the_facts_of_linears() -> None:
    shapes = stacks((2 * INNER, H), (H, INNER)) | {
        "model.layers.0.mlp.gate.weight": [E, H],
        "model.layers.0.norm.weight": [H],
        "model.layers.1.mlp.fc.weight": [H, H],
        "model.layers.1.norm.weight": [H],
    }
    headers = describe_headers(infos_of(shapes, "BF16"), {})
    layers = {layer.name: layer for layer in headers.layers}
    assert layers.keys() - {key.removesuffix(".weight") for key in shapes} == set(ALL)
    gate, up = layers[f"{PATH}.2.gate_proj"], layers[f"{PATH}.2.up_proj"]
    assert (gate.op, gate.type, gate.weight) == ("linear", "Linear", f"{PATH}.gate_up_proj")
    assert (gate.shape, gate.dtype, gate.body) == ((INNER, H), "BF16", True)
    assert gate.group == up.group != layers[f"{PATH}.1.gate_proj"].group
    assert layers["model.layers.0.mlp.gate"].type == "Router"
    order = [layer.order for layer in headers.layers if layer.op == "linear"]
    assert order == list(range(len(order)))


@pytest.fixture(scope="module", params=["mixtral", "gpt_oss", "llama4_text"])
def module(request: pytest.FixtureRequest) -> tuple[str, Any]:
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": H, "intermediate_size": INNER, "num_local_experts": E}
    if request.param == "mixtral":
        config: Any = transformers.MixtralConfig(**sizes, hidden_act="silu")
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts as Experts
    elif request.param == "gpt_oss":
        config = transformers.GptOssConfig(**sizes)
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as Experts
    else:
        config = transformers.Llama4TextConfig(**sizes)
        from transformers.models.llama4.modeling_llama4 import Llama4TextExperts as Experts
    config._experts_implementation = "eager"
    built = Experts(config)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return request.param, built


def test_one_expert_computes_what_transformers_computes(
    module: tuple[str, Any], tmp_path: Path
) -> None:
    """Orientation, halves and the alternating columns of gpt-oss, held against the model's code."""
    import torch

    kind, experts = module
    state = {f"{PATH}.{k}": v.detach().numpy() for k, v in experts.named_parameters()}
    save_file(state, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    headers = describe_headers(checkpoint.infos, {"model_type": kind, "hidden_size": H})
    assert set(ALL) <= headers.places.keys()
    token = torch.randn(1, H, generator=torch.Generator().manual_seed(1))
    for expert in range(E):
        gate, up = (_apply(checkpoint, headers, expert, part, token) for part in ("gate", "up"))
        if kind == "gpt_oss":
            gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
            inner = (up + 1) * gate * torch.sigmoid(gate * experts.alpha)
        else:
            inner = up * torch.nn.functional.silu(gate)
        ours = _apply(checkpoint, headers, expert, "down", inner)
        if kind == "llama4_text":
            theirs = experts(token.repeat(E, 1))[expert]
        else:
            theirs = experts(token, torch.tensor([[expert]]), torch.ones(1, 1))[0]
        assert torch.allclose(ours[0], theirs, rtol=1e-5, atol=1e-5)


def _apply(checkpoint: Checkpoint, headers: Any, expert: int, part: str, entry: Any) -> Any:
    import torch

    name = f"{PATH}.{expert}.{part}_proj"
    place = headers.places[name]
    rows = H if part == "down" else INNER
    product = entry @ torch.from_numpy(read_place(checkpoint, place, 0, rows)).T
    if name not in headers.biases:
        return product
    bias = headers.biases[name]
    row = read_place(checkpoint, bias, 0, 1)
    assert row.shape == (1, rows)
    return product + torch.from_numpy(np.ascontiguousarray(row[0]))


def test_stacked_biases_are_cut_with_their_experts_and_no_longer_listed() -> None:
    shapes = stacks((H, 2 * INNER), (INNER, H)) | {
        f"{PATH}.gate_up_proj_bias": [E, 2 * INNER],
        f"{PATH}.down_proj_bias": [E, H],
    }
    headers = describe_headers(infos_of(shapes), {}, "GptOssForCausalLM")
    assert [layer.name for layer in headers.layers] == sorted(ALL)
    assert headers.biases.keys() == set(ALL)
    gate, down = headers.biases[f"{PATH}.1.gate_proj"], headers.biases[f"{PATH}.1.down_proj"]
    assert (gate.key, gate.start, gate.stop, gate.columns) == (
        f"{PATH}.gate_up_proj_bias",
        1,
        2,
        (0, 2 * INNER, 2),
    )
    assert (down.key, down.columns) == (f"{PATH}.down_proj_bias", (0, H, 1))
