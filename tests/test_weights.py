"""Weights: checked before anything long, scaled with their siblings, made one at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from quantkit.algorithms import ALGORITHMS, Algorithm
from quantkit.algorithms.rounding import rounding
from quantkit.calibrate.stats import Stats
from quantkit.errors import QuantkitError
from quantkit.metrics import flushed_to_zero
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS, get_format
from quantkit.recipes.plan import Plan
from quantkit.recipes.recipe import Decision, Layer, Scheme
from quantkit.weights import Weights, measure

RANDOM = np.random.default_rng(0)
W4A4 = Scheme(FORMATS["nvfp4"], FORMATS["nvfp4"])


def linear(name: str, shape: tuple[int, int] = (32, 64), **facts: Any) -> Layer:
    return Layer(name, f"{name}.weight", "Linear", "linear", shape, **({"group": name} | facts))


def plan_of(*rows: tuple[Layer, Scheme | None]) -> Plan:
    return Plan("test", tuple(Decision(layer, scheme, "") for layer, scheme in rows))


def normal(*shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (RANDOM.standard_normal(shape) * scale).astype(np.float32)


class Reader:
    """A checkpoint in memory that counts how often each parameter is read."""

    def __init__(self, **arrays: NDArray[Any]) -> None:
        self.arrays = {f"{name}.weight": array for name, array in arrays.items()}
        self.reads: list[str] = []

    def __call__(self, name: str) -> NDArray[Any]:
        self.reads.append(name)
        return self.arrays[name]


def seen(**amax: float) -> Mapping[str, Stats]:
    return {name: Stats(input_amax=value, batches=1) for name, value in amax.items()}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_non_finite_weight_stops_pass_one_with_name_count_and_first_index(
    value: float, dtype: Any
) -> None:
    """Case C05."""
    weight = normal(32, 64).astype(dtype)
    weight[3, 5] = weight[9, 0] = value
    read = Reader(fine=normal(32, 64), broken=weight)
    plan = plan_of((linear("fine"), W4A4), (linear("broken"), W4A4))
    with pytest.raises(QuantkitError, match=r"broken\.weight: 2 of 2048 .*\[3, 5\]"):
        measure(plan, read)


def test_a_non_finite_value_in_a_kept_layer_or_a_bias_is_found_too() -> None:
    """Case C05."""
    norm = Layer("norm", "norm.weight", "LayerNorm", "norm", (4,))
    read = Reader(norm=np.array([1, np.inf, 1, 1], np.float32), a=normal(32, 64))
    with pytest.raises(QuantkitError, match=r"norm\.weight: 1 of 4"):
        measure(plan_of((linear("a"), W4A4), (norm, None)), read)
    read.arrays["a.bias"] = np.array([0, np.nan], np.float32)
    with pytest.raises(QuantkitError, match=r"a\.bias: 1 of 2"):
        measure(plan_of((linear("a"), W4A4)), read, others=["a.bias"])


def test_pass_one_reads_each_parameter_once_and_reports_progress() -> None:
    read = Reader(a=normal(32, 64), b=-3 * np.ones((32, 64), np.float32))
    steps: list[tuple[int, int]] = []
    amax = measure(
        plan_of((linear("a"), W4A4), (linear("b"), W4A4)),
        read,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert amax == {"a": float(np.abs(read.arrays["a.weight"]).max()), "b": 3.0}
    assert read.reads == ["a.weight", "b.weight"]
    assert steps == [(1, 2), (2, 2)]


def test_siblings_share_a_tensor_scale_and_have_their_own_block_scales() -> None:
    q, k = normal(32, 64), normal(32, 64, scale=10)
    read = Reader(q=q, k=k, other=normal(32, 64))
    plan = plan_of(
        (linear("q", group="x"), W4A4), (linear("k", group="x"), W4A4), (linear("other"), W4A4)
    )
    weights = Weights(plan, seen(q=4.0, k=4.0, other=1.0), read)
    expected = np.float32(np.abs(k).max()) / np.float32(2688)
    assert weights.tensor_scale("q") == weights.tensor_scale("k") == expected
    assert weights.tensor_scale("other") != expected
    ours = weights.load("q")
    alone = kernels.quantize(q, FORMATS["nvfp4"])
    given = kernels.quantize(q, FORMATS["nvfp4"], expected)
    assert np.array_equal(ours.data, given.data)
    assert np.array_equal(ours.scale, given.scale)
    assert not np.array_equal(ours.scale, alone.scale)


def test_a_shared_parameter_has_one_tensor_scale_even_across_groups() -> None:
    """Case C14: the parameter is stored once, so it cannot have two scales."""
    head = Layer("head", "a.weight", "Linear", "linear", (32, 64), group="head", tied=("a",))
    read = Reader(a=normal(32, 64), b=normal(32, 64, scale=9))
    plan = plan_of((linear("a", group="x"), W4A4), (linear("b", group="x"), W4A4), (head, W4A4))
    weights = Weights(plan, seen(a=1.0, b=1.0, head=2.0), read)
    assert weights.tensor_scale("head") == weights.tensor_scale("a") == weights.tensor_scale("b")
    assert weights.input_scale("head") != weights.input_scale("a")


@pytest.mark.parametrize(
    ("fmt", "divisor"), [("nvfp4", 2688), ("fp8", 448), ("mxfp8", None), ("mxfp4", None)]
)
def test_input_scale_is_amax_over_the_formats_range_and_shared_by_siblings(
    fmt: str, divisor: int | None
) -> None:
    scheme = Scheme(FORMATS["mxfp8"], get_format(fmt))
    plan = plan_of((linear("q", group="x"), scheme), (linear("k", group="x"), scheme))
    weights = Weights(plan, seen(q=3.0, k=5.0), Reader(q=normal(32, 64), k=normal(32, 64)))
    expected = None if divisor is None else np.float32(5) / np.float32(divisor)
    assert weights.input_scale("q") == weights.input_scale("k") == expected


def test_an_input_that_was_always_zero_gets_scale_one() -> None:
    weights = Weights(plan_of((linear("a"), W4A4)), seen(a=0.0), Reader(a=normal(32, 64)))
    assert weights.input_scale("a") == 1


def test_weight_only_needs_no_statistics_and_a_quantized_input_does() -> None:
    read = Reader(a=normal(32, 64))
    only = Weights(plan_of((linear("a"), Scheme(FORMATS["nvfp4"]))), {}, read)
    assert only.input_scale("a") is None
    with pytest.raises(QuantkitError, match=r"a: a nvfp4 input needs calibration"):
        Weights(plan_of((linear("a"), W4A4)), {}, read)


def test_an_algorithm_that_lacks_its_statistics_is_refused_up_front(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needy = Algorithm(rounding, frozenset({"input_second_moment"}))
    monkeypatch.setitem(ALGORITHMS, "needy", needy)
    plan = plan_of((linear("a"), Scheme(FORMATS["nvfp4"], algorithm="needy")))
    with pytest.raises(QuantkitError, match="a: algorithm needy needs input_second_moment"):
        Weights(plan, {}, Reader(a=normal(32, 64)))


@pytest.mark.parametrize("fmt", sorted(FORMATS))
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_loading_equals_quantizing_the_weight_by_hand(fmt: str, dtype: Any) -> None:
    weight = normal(32, 64).astype(dtype)
    weights = Weights(plan_of((linear("a"), Scheme(FORMATS[fmt]))), {}, Reader(a=weight))
    expected = kernels.quantize(weight, FORMATS[fmt])
    assert np.array_equal(weights.load("a").data, expected.data)
    assert np.array_equal(weights.load("a").scale, expected.scale)
    assert weights.load("a").tensor_scale == expected.tensor_scale == weights.tensor_scale("a")


def test_a_transposed_weight_is_quantized_along_its_contraction_axis() -> None:
    stored = normal(64, 32)  # (K, N), as in GPT-2
    plan = plan_of((linear("a", transposed=True), W4A4))
    loaded = Weights(plan, seen(a=1.0), Reader(a=stored)).load("a")
    expected = kernels.quantize(np.ascontiguousarray(stored.T), FORMATS["nvfp4"])
    assert loaded.shape == (32, 64)
    assert np.array_equal(loaded.data, expected.data)


def test_a_weight_of_another_shape_is_refused() -> None:
    weights = Weights(plan_of((linear("a"), W4A4)), seen(a=1.0), Reader(a=normal(64, 64)))
    with pytest.raises(QuantkitError, match=r"a\.weight: .*\(64, 64\).*\(32, 64\)"):
        weights.load("a")


def test_a_layer_is_read_once_while_its_parts_are_asked_for_and_scales_cost_no_read() -> None:
    read = Reader(a=normal(32, 64), b=normal(32, 64))
    plan = plan_of((linear("a"), W4A4), (linear("b"), W4A4))
    weights = Weights(plan, seen(a=1.0, b=1.0), read, amax=measure(plan, read))
    read.reads.clear()
    assert weights.tensor_scale("a") is not None
    assert weights.input_scale("a") is not None
    assert read.reads == []
    assert weights.load("a") is weights.load("a")
    weights.load("b")
    weights.load("a")
    assert read.reads == ["a.weight", "b.weight", "a.weight"]


def test_threads_that_load_at_once_all_get_their_own_layer() -> None:
    names = [f"l{index}" for index in range(6)]
    read = Reader(**{name: normal(32, 64) for name in names})
    plan = plan_of(*((linear(name), Scheme(FORMATS["nvfp4"])) for name in names))
    weights = Weights(plan, {}, read)
    wrong: list[str] = []

    def work(name: str) -> None:
        expected = kernels.quantize(read.arrays[f"{name}.weight"], FORMATS["nvfp4"])
        loaded = (weights.load(name).data for _ in range(20))
        wrong.extend(name for data in loaded if not np.array_equal(data, expected.data))

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_one_huge_weight_that_flushes_the_rest_is_reported_with_its_place() -> None:
    """Case C03, its reproduction."""
    weight = normal(64, 128, scale=1e-3)
    weight[0, 0] = 1e4
    plan = plan_of((linear("a", (64, 128)), Scheme(FORMATS["nvfp4"])))
    weights = Weights(plan, {}, Reader(a=weight))
    decoded = kernels.dequantize(weights.load("a"))
    share = float(np.mean((decoded == 0)[weight != 0]))
    assert 0.9 < share < 0.96
    assert flushed_to_zero(weight, weights.load("a")) == pytest.approx(share, abs=2e-3)
    (warning,) = weights.warnings
    assert warning.startswith(("a: 92", "a: 93", "a: 94"))
    assert "[0, 0] is 10000" in warning
    weights.load("a")
    assert len(weights.warnings) == 1


def test_a_sibling_that_flushes_a_layer_is_named() -> None:
    """Case C03: the tensor scale is shared, so the outlier may lie in another layer."""
    loud = normal(32, 64)
    loud[4, 4] = 1e5
    read = Reader(q=normal(32, 64, scale=1e-3), k=loud)
    plan = plan_of((linear("q", group="x"), W4A4), (linear("k", group="x"), W4A4))
    weights = Weights(plan, seen(q=1.0, k=1.0), read)
    weights.load("q")
    (warning,) = weights.warnings
    assert warning.startswith("q: ")
    assert "because k, which shares its scale, has a weight of magnitude 100000" in warning


@pytest.mark.parametrize("fmt", sorted(FORMATS))
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_ordinary_rounding_to_zero_is_not_called_flushing(fmt: str, dtype: Any) -> None:
    """FP4 rounds 7 % of a Gaussian to zero; a warning on every layer would hide the real one."""
    weights = Weights(
        plan_of((linear("a", (128, 256)), Scheme(FORMATS[fmt]))),
        {},
        Reader(a=normal(128, 256).astype(dtype)),
    )
    weights.load("a")
    assert weights.warnings == []


def test_fp8_rows_under_an_outlier_are_reported() -> None:
    """Case C03 for a scale that spans a row."""
    weight = normal(32, 64, scale=1e-3)
    weight[7, 9] = -1e4
    plan = plan_of((linear("a"), Scheme(FORMATS["fp8_channel"])))
    weights = Weights(plan, {}, Reader(a=weight))
    assert flushed_to_zero(weight, weights.load("a")) == pytest.approx(63 / 2048, abs=1e-9)
    assert "[7, 9] is -10000" in weights.warnings[0]


@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_counting_zeros_in_pieces_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, fmt: str
) -> None:
    weight = normal(40, 64, scale=1e-3)
    weight[7, 9] = 1e5
    quantized = kernels.quantize(weight, FORMATS[fmt])
    whole = flushed_to_zero(weight, quantized)
    monkeypatch.setattr("quantkit.metrics._CHUNK", 7 * 64)
    assert flushed_to_zero(weight, quantized) == whole
