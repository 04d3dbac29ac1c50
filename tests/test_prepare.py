"""What is checked before what, where ranges come from, and that a run repeats to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import quantkit.prepare
from quantkit.errors import QuantkitError
from quantkit.manifest import content_key
from quantkit.models.source import Source, open_model
from quantkit.models.trace import Traced
from quantkit.numerics.qtensor import QTensor
from quantkit.prepare import (
    STATS_FILE,
    Planned,
    check_device,
    describe_model,
    estimate_peak_memory,
    find_dtype,
    kept_dtype,
    needs_data,
    plan_model,
    prepare,
    read_stats,
    running_module,
    write_stats,
)
from quantkit.progress import Advance
from quantkit.weights import Weights
from tests.artefacts import plan_traced, random_batches, write_net


def unread() -> Iterator[dict[str, Tensor]]:
    pytest.fail("the calibration data was read")
    yield {}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    return plan_model(write_net(tmp_path_factory.mktemp("net")), recipe="nvfp4")


def equal(a: QTensor, b: QTensor) -> bool:
    return (
        a.format is b.format
        and np.array_equal(a.data, b.data)
        and np.array_equal(a.scale, b.scale)
        and a.tensor_scale == b.tensor_scale
    )


# Planning


def test_a_plan_says_what_was_chosen_and_reads_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Source, "read_weight", lambda *_: pytest.fail("a weight was read"))
    source = open_model(write_net(tmp_path))
    short, named = (plan_model(source, short="fp4"), plan_model(source, recipe="nvfp4"))
    assert short.plan.schemes == named.plan.schemes
    assert "nvfp4" in short.picked
    assert named.recipe == {
        "name": "nvfp4",
        "source": "recipe nvfp4",
        "file": None,
        "content_key": None,
        "unmatched_optional": list(named.plan.unmatched_optional),
    }
    assert len(named.plan.quantized) == 6


def test_a_model_is_given_as_text_path_or_opened(tmp_path: Path) -> None:
    spec = write_net(tmp_path)
    plans = [plan_model(model, recipe="fp8").plan for model in (spec, Path(spec), open_model(spec))]
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize("choice", [{}, {"recipe": "nvfp4", "short": "fp4"}])
def test_a_recipe_is_chosen_in_exactly_one_way(tmp_path: Path, choice: dict[str, str]) -> None:
    with pytest.raises(QuantkitError, match="--fp4, --fp8 or --recipe"):
        plan_model(write_net(tmp_path), **choice)  # type: ignore[arg-type]


def test_an_unknown_algorithm_is_found_before_any_work(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "description: a test\nrules:\n  - match: {op: linear}\n"
        "    quantize: {weight: nvfp4, algorithm: magic}\n"
    )
    with pytest.raises(QuantkitError, match=r"mine.*'magic' for blocks\.0\.q; known: .*rounding"):
        plan_model(write_net(tmp_path), recipe=str(recipe))


def test_a_recipe_file_is_pinned_by_its_content(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "description: a test\nrules:\n  - match: {op: linear}\n    quantize: {weight: nvfp4}\n"
    )
    planned = plan_model(write_net(tmp_path), recipe=str(recipe))
    assert planned.recipe["content_key"] == content_key(recipe)
    recipe.write_text(recipe.read_text() + "# edited while the model was quantized\n")
    assert planned.recipe["content_key"] != content_key(recipe)


def test_the_compute_dtype_is_the_checkpoints_or_the_one_that_was_asked_for(tmp_path: Path) -> None:
    plain = open_model(write_net(tmp_path))
    assert find_dtype("auto", plain) is torch.float32
    assert find_dtype("fp16", plain) is torch.float16
    with pytest.raises(QuantkitError, match=r"'fp12'; known: auto, fp32, fp16, bf16"):
        find_dtype("fp12", plain)
    wide = open_model(write_net(tmp_path / "wide", change="net.double()"))
    with pytest.raises(QuantkitError, match="float64, which nothing computes in"):
        find_dtype("auto", wide)
    assert find_dtype("fp32", wide) is torch.float32


def test_peak_memory_counts_the_model_only_where_it_is_loaded(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight_only = plan_traced(planned.traced, "nvfp4-weight-only")
    whole = planned.source.parameters * 4
    assert estimate_peak_memory(planned) - estimate_peak_memory(weight_only) == whole
    monkeypatch.setattr(quantkit.prepare, "LOAD_LIMIT_BYTES", whole - 1)
    assert estimate_peak_memory(planned) == estimate_peak_memory(weight_only)


# Preparing


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (
            "net.blocks[1].out.weight.data[2, 7] = float('nan')",
            r"blocks\.1\.out\.weight: 1 of 2048",
        ),
        ("net.blocks[0].q.bias.data[3] = float('inf')", r"blocks\.0\.q\.bias: 1 of 32"),
        ("net.blocks[1].norm.weight.data[0] = -float('inf')", r"blocks\.1\.norm\.weight: 1 of 64"),
    ],
)
def test_a_broken_weight_stops_before_calibration_data_is_touched(
    tmp_path: Path, change: str, place: str
) -> None:
    """Case C05."""
    planned = plan_model(write_net(tmp_path, change=change), recipe="nvfp4")
    with pytest.raises(QuantkitError, match=place):
        prepare(planned, calibration=unread())


def test_a_device_that_is_not_there_stops_before_anything_is_read(planned: Planned) -> None:
    with pytest.raises(QuantkitError, match="'elsewhere' cannot be used"):
        check_device("elsewhere")
    with pytest.raises(QuantkitError, match="'elsewhere' cannot be used"):
        prepare(planned, calibration=unread(), device="elsewhere")


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [
        ("nvfp4", True),
        ("fp8", True),
        ("mxfp8", False),
        ("mxfp4", False),
        ("nvfp4-weight-only", False),
        ("fp8-weight-only", False),
    ],
)
def test_only_static_input_scales_need_data(planned: Planned, recipe: str, wanted: bool) -> None:
    again = plan_traced(planned.traced, recipe)
    assert needs_data(again.plan) is wanted
    if wanted:
        return
    prepared = prepare(again)
    assert prepared.calibration == {}
    assert not prepared.warnings
    assert all(prepared.weights.input_scale(name) is None for name in prepared.weights)


def test_data_that_is_not_needed_is_not_read_and_the_user_is_told(planned: Planned) -> None:
    again = plan_traced(planned.traced, "mxfp8")
    prepared = prepare(again, calibration=unread())
    assert prepared.warnings == ("recipe mxfp8 needs no calibration data: not used",)


def test_a_model_without_a_task_is_calibrated_on_made_up_data_with_a_warning(
    planned: Planned,
) -> None:
    prepared = prepare(planned)
    assert prepared.calibration["source"] == "random"
    assert any("NO CALIBRATION DATA" in line for line in prepared.warnings)


def test_ranges_are_those_of_the_data_shared_by_siblings(planned: Planned) -> None:
    batches = random_batches(planned.source, 4)
    prepared = prepare(planned, calibration=batches)
    # One batch in five, here the last, is held out for verification.
    module, used = planned.source.load(), batches[:3]
    with torch.no_grad():
        amax = max(float(module.blocks[0].norm(batch["x"]).abs().max()) for batch in used)
    for name in ("blocks.0.q", "blocks.0.k"):
        assert prepared.stats[name].input_amax == amax
        assert prepared.weights.input_scale(name) == np.float32(amax) / np.float32(2688)
        assert prepared.stats[name].batches == 3
    assert prepared.calibration["samples"] == 3
    assert prepared.calibration["uncalibrated"] == []


def test_progress_names_every_long_step_and_ends_each(planned: Planned) -> None:
    steps: dict[str, list[tuple[int, int]]] = {}

    @contextmanager
    def progress(what: str) -> Iterator[Advance]:
        steps[what] = []
        yield lambda done, total: steps[what].append((done, total))

    prepare(planned, calibration=random_batches(planned.source), progress=progress)
    assert list(steps) == ["Reading weights", "Loading calibration data", "Calibrating"]
    for what in ("Reading weights", "Calibrating"):
        done, total = steps[what][-1]
        assert done == total > 0


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_model_above_the_limit_borrows_its_weights_and_sees_the_same_numbers(
    name: str,
    opened: Callable[[str], Source],
    traced: Callable[[str], Traced],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rotary tables and position ids are buffers that no checkpoint holds."""
    planned = plan_traced(traced(name), "nvfp4")
    batches = random_batches(opened(name))
    loaded = prepare(planned, calibration=batches)
    monkeypatch.setattr(quantkit.prepare, "LOAD_LIMIT_BYTES", 0)
    monkeypatch.setattr(Source, "load", lambda *_: pytest.fail("the model was loaded whole"))
    borrowed = prepare(planned, calibration=batches)
    assert borrowed.stats == loaded.stats
    assert borrowed.calibration == loaded.calibration


def test_a_borrowing_module_holds_nothing_when_it_is_done(
    opened: Callable[[str], Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantkit.prepare, "LOAD_LIMIT_BYTES", 0)
    source = opened("llama")
    expected = source.call(source.load(), random_batches(source, 1)[0])
    with running_module(source, torch.float32) as module, torch.inference_mode():
        assert all(parameter.is_meta for parameter in module.parameters())
        actual = source.call(module, random_batches(source, 1)[0])
    assert torch.equal(actual["logits"], expected["logits"])
    assert all(parameter.is_meta for parameter in module.parameters())


def test_the_same_run_gives_the_same_bytes(planned: Planned, tmp_path: Path) -> None:
    files = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_stats(prepare(planned, calibration=random_batches(planned.source)), folder)
        files.append((folder / STATS_FILE).read_bytes())
    assert files[0] == files[1]


def test_a_float32_checkpoint_computes_in_bf16_and_is_quantized_from_float32(
    tmp_path: Path,
) -> None:
    source = open_model(write_net(tmp_path))
    narrow = plan_model(source, recipe="nvfp4", compute_dtype="bf16")
    assert narrow.traced.dtype is torch.bfloat16
    assert kept_dtype(narrow) == "BF16"
    prepared = prepare(narrow, calibration=random_batches(source))
    wide = prepare(plan_model(source, recipe="nvfp4"), calibration=random_batches(source))
    for name in prepared.weights:
        # Weights are never rounded twice; ranges are of what bf16 activations are.
        assert equal(prepared.weights.load(name), wide.weights.load(name))
        seen = prepared.stats[name].input_amax
        assert seen is not None
        assert seen == float(torch.tensor(seen, dtype=torch.bfloat16))
        assert seen == pytest.approx(wide.stats[name].input_amax, rel=0.03)


# The record of it


def test_statistics_come_back_and_give_the_same_scales_and_codes(
    planned: Planned, tmp_path: Path
) -> None:
    prepared = prepare(planned, calibration=random_batches(planned.source))
    write_stats(prepared, tmp_path)
    stats, amax = read_stats(tmp_path, planned.plan)
    assert stats == dict(prepared.stats)
    again = Weights(planned.plan, stats, planned.source.read_weight, amax)
    for name in prepared.weights:
        assert again.amax(name) == prepared.weights.amax(name)
        assert again.input_scale(name) == prepared.weights.input_scale(name)
        assert equal(again.load(name), prepared.weights.load(name))


def test_layers_without_ranges_are_recorded_too(planned: Planned, tmp_path: Path) -> None:
    weight_only = plan_traced(planned.traced, "nvfp4-weight-only")
    write_stats(prepare(weight_only), tmp_path)
    stats, amax = read_stats(tmp_path, weight_only.plan)
    assert amax.keys() == stats.keys() == weight_only.plan.schemes.keys()
    assert all(row.input_amax is None and row.batches == 0 for row in stats.values())


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows: rows.pop("blocks.0.q"),
        lambda rows: rows["blocks.0.q"].pop("input_amax"),
        lambda rows: rows["blocks.0.q"].update(weight_amax=None),
        lambda rows: rows.update({"blocks.0.q": 3}),
    ],
)
def test_damaged_statistics_are_one_clear_line(
    planned: Planned, tmp_path: Path, damage: Callable[[Any], object]
) -> None:
    write_stats(prepare(planned, calibration=random_batches(planned.source)), tmp_path)
    path = tmp_path / STATS_FILE
    rows = json.loads(path.read_text())
    damage(rows)
    path.write_text(json.dumps(rows))
    with pytest.raises(QuantkitError, match=r"stats\.json does not hold the statistics"):
        read_stats(tmp_path, planned.plan)


def test_the_content_key_of_a_model_changes_with_one_byte_of_one_weight(tmp_path: Path) -> None:
    keys = {}
    for name, change in (
        ("a", "pass"),
        ("b", "net.blocks[1].k.weight.data.view(torch.uint8)[0, 0] ^= 1"),
    ):
        # One file, so that the code is the same and only the weight differs.
        spec = write_net(tmp_path, change="import os; exec(os.environ['CHANGE_WEIGHT'])")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CHANGE_WEIGHT", change.replace("torch", "__import__('torch')"))
            source = open_model(spec)
        keys[name] = describe_model(source)["content_key"]
    assert keys["a"] != keys["b"]
