"""How much of a delta is left. The figures in the module's docstring are measured here."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from quantkit.models.headers.place import Place
from quantkit.models.lora.match import match
from quantkit.models.lora.merge import Deltas, merge
from quantkit.models.lora.survival import Survival, Survived, describe, total
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from tests.models.lora.files import (
    Array,
    delta_rows,
    make_pair,
    match_one,
    merge_rows,
    random_array,
    write_lora,
)

NVFP4 = FORMATS["nvfp4"]
SIZE, RANK = 1024, 16


def quantize(x: Array) -> Array:
    return kernels.dequantize(kernels.quantize(x, NVFP4))


def make_deltas(folder: Path, relative: float, n: int = SIZE, k: int = SIZE) -> Deltas:
    """A LoRA whose delta has `relative` of the norm of a weight of unit variance."""
    scale = relative / np.sqrt(RANK)
    lora = write_lora(folder / "x.safetensors", make_pair("a", n, k, RANK), float(scale))
    return match_one(lora, {"a.weight": (n, k)})


def survive(deltas: Deltas, weight: Array) -> Survived:
    survival = Survival(deltas, {"a": Place("a.weight", 0, len(weight))})
    merged = merge(deltas, "a.weight", weight)
    survival("a", 0, merged, kernels.quantize(merged, NVFP4))
    (row,) = survival.rows()
    return row


@pytest.mark.parametrize(
    ("relative", "ratio", "share_before"),
    [(0.01, 0.105, 0.0), (0.03, 0.315, 0.11), (0.1, 1.05, 0.85), (0.3, 3.0, 0.99)],
)
def test_the_share_tells_weights_quantized_before_from_others(
    tmp_path: Path, relative: float, ratio: float, share_before: float
) -> None:
    deltas = make_deltas(tmp_path, relative)
    fresh = random_array(SIZE, SIZE, seed=5)
    row = survive(deltas, fresh)
    assert row.share == pytest.approx(1, abs=4 / (ratio * SIZE) + 0.01)
    assert row.ratio == pytest.approx(ratio, rel=0.05)
    assert row.size == pytest.approx(relative, rel=0.1)
    assert not row.lost
    before = survive(deltas, quantize(fresh))
    assert before.share == pytest.approx(share_before, abs=0.03)
    assert before.lost == (share_before < 0.9)


@pytest.mark.parametrize(("relative", "effect"), [(0.01, 1.2), (0.1, 0.12)])
def test_error_over_effect_for_inputs_of_the_lora(
    tmp_path: Path, relative: float, effect: float
) -> None:
    deltas = make_deltas(tmp_path, relative)
    weight = random_array(SIZE, SIZE, seed=5)
    merged = merge(deltas, "a.weight", weight)
    delta = delta_rows(deltas, "a.weight", 0, 0, (SIZE, SIZE))
    error = quantize(merged) - merged
    inputs = deltas.loras[0].read("a.lora_A.weight").T @ random_array(RANK, 64, seed=8)
    measured = np.linalg.norm(error @ inputs) / np.linalg.norm(delta @ inputs)
    assert measured == pytest.approx(effect, rel=0.1)
    ratio = survive(deltas, weight).ratio
    assert ratio is not None
    assert measured == pytest.approx(np.sqrt(RANK / SIZE) / ratio, rel=0.1)


def test_sums_are_those_of_float64(tmp_path: Path) -> None:
    deltas = make_deltas(tmp_path, 0.1, 130, 48)
    weight = random_array(130, 48, seed=5)
    row = survive(deltas, weight)
    merged = merge(deltas, "a.weight", weight)
    m, q = merged.astype(np.float64), quantize(merged).astype(np.float64)
    d = delta_rows(deltas, "a.weight", 0, 0, (130, 48)).astype(np.float64)
    wanted = 1 + ((q - m) * d).sum() / (d * d).sum()
    assert row.share == pytest.approx(wanted, rel=1e-9)
    # The definition: what arrives of the delta, in its own direction.
    assert row.share == pytest.approx(((q - (m - d)) * d).sum() / (d * d).sum(), rel=1e-9)
    assert row.ratio == pytest.approx(np.linalg.norm(d) / np.linalg.norm(q - m), rel=1e-9)


def test_no_bit_depends_on_order_threads_or_the_size_of_chunks(tmp_path: Path) -> None:
    deltas = make_deltas(tmp_path, 0.1, 700, 64)
    weight = random_array(700, 64, seed=5)
    scale = kernels.quantize(merge(deltas, "a.weight", weight), NVFP4).tensor_scale
    found = []
    for step, threads in ((700, 1), (128, 1), (128, 4), (256, 4), (1, 1)):
        survival = Survival(deltas, {"a": Place("a.weight", 0, 700)})

        def work(start: int, step: int = step, survival: Survival = survival) -> None:
            rows = merge_rows(deltas, "a.weight", start, weight[start : start + step])
            survival("a", start, rows, kernels.quantize(rows, NVFP4, scale))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, reversed(range(0, 700, step))))
        found.append(survival.rows())
    assert all(rows == found[0] for rows in found)


def test_rows_that_are_never_quantized_do_not_count(tmp_path: Path) -> None:
    deltas = make_deltas(tmp_path, 0.1, 256, 32)
    merged = merge(deltas, "a.weight", random_array(256, 32, seed=5))
    survival = Survival(deltas, {"a": Place("a.weight", 0, 256)})
    survival("a", 128, merged[128:], kernels.quantize(merged[128:], NVFP4))
    (row,) = survival.rows()
    assert row.elements == 128 * 32
    assert row.share == pytest.approx(1, abs=0.1)


def test_a_layer_is_what_its_place_holds(tmp_path: Path) -> None:
    """Turned round, or a part of a stack: the sums are over the same elements."""
    lora = write_lora(tmp_path / "x.safetensors", make_pair("a", 64, 32, 4), 0.1)
    deltas = match_one(lora, {"a.weight": (64, 32)})
    merged = merge(deltas, "a.weight", random_array(64, 32, seed=5))
    delta = delta_rows(deltas, "a.weight", 0, 0, (64, 32)).astype(np.float64)
    places = {
        "turned": Place("a.weight", 0, 64, transposed=True),
        "half": Place("a.weight", 32, 64),
        "other": Place("b.weight", 0, 64),
    }
    survival = Survival(deltas, places)
    for name, rows in (("turned", merged.T), ("half", merged[32:]), ("other", merged)):
        survival(name, 0, rows, kernels.quantize(np.ascontiguousarray(rows), NVFP4))
    half, turned = survival.rows()
    assert (half.layer, half.elements) == ("half", 32 * 32)
    assert (turned.layer, turned.elements) == ("turned", 64 * 32)
    assert half.delta == pytest.approx((delta[32:] ** 2).sum(), rel=1e-9)
    assert turned.delta == pytest.approx((delta**2).sum(), rel=1e-9)
    error = quantize(np.ascontiguousarray(merged.T)) - merged.T
    assert turned.error_delta == pytest.approx((error * delta.T).sum(), rel=1e-6)


def test_a_resumed_run_takes_over_what_was_noted(tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "x.safetensors", make_pair("a", 64, 32) | make_pair("b", 64, 32))
    deltas = match_one(lora, {"a.weight": (64, 32), "b.weight": (64, 32)})
    places = {name: Place(f"{name}.weight", 0, 64) for name in ("a", "b")}
    whole, first, second = (Survival(deltas, places) for _ in range(3))
    for name in ("a", "b"):
        merged = merge(deltas, f"{name}.weight", random_array(64, 32, seed=5))
        for survival in (whole, first if name == "a" else second):
            survival(name, 0, merged, kernels.quantize(merged, NVFP4))
        if name == "a":
            # A layer that is still being written when another one is finished.
            second("b", 0, merged[:16], kernels.quantize(merged[:16], NVFP4))
            assert second.note("a") == []
    note = json.loads(json.dumps(first.note("a")))
    assert first.note("c") == []
    second.restore("a", note)
    assert second.rows() == whole.rows()
    assert first.rows() == whole.rows()[:1]


def test_each_lora_has_its_own_share(tmp_path: Path) -> None:
    one = write_lora(tmp_path / "one.safetensors", make_pair("a", 64, 64), 0.02)
    two = write_lora(tmp_path / "two.safetensors", make_pair("a", 64, 64, seed=7), 2.0)
    deltas = match([one, two], {"a.weight": (64, 64)})
    survival = Survival(deltas, {"a": Place("a.weight", 0, 64)})
    merged = merge(deltas, "a.weight", random_array(64, 64))
    survival("a", 0, merged, kernels.quantize(merged, NVFP4))
    first, second = survival.rows()
    assert (first.lora, second.lora) == ("one.safetensors", "two.safetensors")
    assert second.delta > 1000 * first.delta
    assert first.error == second.error


def row(lora: str, layer: str, share: float, ratio: float, elements: int = 10**6) -> Survived:
    return Survived(lora, layer, elements, share - 1, 1.0, 1 / ratio**2, 100.0)


def test_lines_for_people_name_the_worst_weight_and_warn_of_losses() -> None:
    good = [row("x", "a", 0.98, 2.0), row("x", "b", 0.96, 2.0)]
    (line,) = describe(good)
    assert line == (
        "LoRA x: 2 layers, 0.97 of the delta survives (worst 0.96: b), 2 times the "
        "quantization error"
    )
    lines = describe([row("x", "a", 0.3, 2.0), row("x", "b", 0.96, 2.0)])
    assert "less than 0.9 of the delta survives in all together" in lines[1]
    lines = describe([*good, row("x", "c", 0.85, 2.0)])
    assert "survives in 1 layers" in lines[1]
    lines = describe([row("x", "a", 0.99, 0.05)])
    assert "20 times as much as the LoRA" in lines[1]
    zero = Survived("x", "a", 10, 0.0, 0.0, 1.0, 1.0)
    assert describe([zero]) == ["LoRA x: its deltas are zero in all 1 quantized layers"]
    assert describe([]) == []


def test_a_small_weight_is_not_said_to_be_lost_by_chance() -> None:
    assert not row("x", "a", 0.8, 0.1, elements=1000).lost
    assert row("x", "a", 0.8, 0.1, elements=10**6).lost


def test_rows_go_into_a_manifest_and_add_up() -> None:
    rows = [row("x", "a", 0.9, 2.0), row("x", "b", 0.7, 1.0)]
    assert total(rows).share == pytest.approx(0.8)
    assert total(rows).elements == 2 * 10**6
    content = json.loads(json.dumps([r.to_json() for r in rows]))
    assert content[0]["share"] == pytest.approx(0.9)
    assert content[1]["ratio"] == pytest.approx(1)
    assert content[0]["layer"] == "a"
