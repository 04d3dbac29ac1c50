from __future__ import annotations

from dataclasses import replace

import pytest

from quantkit.errors import QuantkitError
from quantkit.numerics.formats import get_format
from quantkit.recipes.constraints import apply_constraints, obstacle
from quantkit.recipes.layer import Decision, Scheme

NVFP4 = Scheme(get_format("nvfp4"), get_format("nvfp4"))
FP8 = Scheme(get_format("fp8_channel"), get_format("fp8"))
BLOCK = Scheme(get_format("fp8_block"), get_format("fp8_group"))
TALL = replace(get_format("fp8_block"), name="tall", ragged=False)


@pytest.mark.parametrize(
    ("shape", "scheme", "said"),
    [
        ((64, 40), NVFP4, "K = 40 is not a multiple of nvfp4's block of 16"),
        ((64, 16), NVFP4, "K = 16: TensorRT runs NVFP4 with K below 32 in BF16"),
        ((64, 48), Scheme(get_format("mxfp8"), get_format("mxfp8")), "mxfp8's block of 32"),
        ((64, 40), Scheme(get_format("fp8_channel"), get_format("mxfp8")), "mxfp8's block of 32"),
        ((64, 32), NVFP4, None),
        ((1, 48), NVFP4, None),
        ((3, 7), FP8, None),
        ((576, 7168), BLOCK, None),
        ((200, 72), BLOCK, None),
        ((0, 64), BLOCK, "its weight of 0 x 64 is empty"),
        ((64, 0), FP8, "its weight of 64 x 0 is empty"),
        ((64, 128), Scheme(TALL), "N = 64 is not a multiple of tall's block of 128"),
    ],
)
def test_a_shape_that_does_not_fit_keeps_the_layer_with_the_reason(layer, shape, scheme, said):
    reason = obstacle(Decision(layer("fc", *shape), scheme, "asked"))
    assert reason is None if said is None else said in (reason or "")


def test_only_matmuls_of_matrices_can_be_quantized(layer):
    """C12 and C13: a convolution and stacked experts are kept even when a rule asks for them."""
    conv = layer("conv", 8, 64, 1, 1, type="Conv2d", op="conv")
    experts = layer("experts", 4, 64, 128, type="Parameter", op="linear")
    assert "operator is 'conv'" in (obstacle(Decision(conv, NVFP4, "")) or "")
    assert "its weight is 3-D (4, 64, 128)" in (obstacle(Decision(experts, NVFP4, "")) or "")


def test_a_layer_tied_to_a_kept_one_is_kept_and_says_with_whom(layer):
    """C14: a head called "head", tied to an embedding that a recipe keeps."""
    embedding = layer("emb", 100, 64, type="Embedding", op="embedding", tied=("head",))
    head = layer("head", 100, 64, tied=("emb",))
    free = layer("free", 100, 64)
    result = apply_constraints(
        [
            Decision(embedding, None, "embedding"),
            Decision(head, NVFP4, ""),
            Decision(free, NVFP4, ""),
        ]
    )
    assert [d.scheme for d in result] == [None, None, NVFP4]
    assert result[1].reason == "shares its weight with emb, which is kept"


def test_a_tie_to_a_module_outside_the_graph_counts_as_kept(layer):
    (result,) = apply_constraints([Decision(layer("head", tied=("unused",)), NVFP4, "")])
    assert result.scheme is None
    assert result.reason == "shares its weight with unused, which is kept"


def test_tied_matmuls_with_one_scheme_stay_quantized_and_with_two_are_an_error(layer):
    one, two = layer("a", tied=("b",)), layer("b", tied=("a",))
    same = apply_constraints([Decision(one, NVFP4, ""), Decision(two, NVFP4, "")])
    assert [d.scheme for d in same] == [NVFP4, NVFP4]
    with pytest.raises(
        QuantkitError, match="a and b share one weight but are asked for nvfp4 with"
    ):
        apply_constraints([Decision(one, NVFP4, ""), Decision(two, FP8, "")])


def test_an_obstacle_on_one_tied_layer_keeps_its_partner(layer):
    odd = layer("odd", 64, 64, type="Conv2d", op="conv", tied=("fc",))
    result = apply_constraints(
        [Decision(odd, NVFP4, ""), Decision(layer("fc", tied=("odd",)), NVFP4, "")]
    )
    assert [d.scheme for d in result] == [None, None]
