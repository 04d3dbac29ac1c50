"""An export decided again from what its manifest says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.again import recorded_inputs, redraft
from quantkit.export.checkpoint.begin import draft_export
from quantkit.export.checkpoint.draft import Draft
from quantkit.export.checkpoint.run import InputScales, write_draft
from quantkit.manifest import Manifest
from tests.export.checkpoint.models import llama_tensors, write_model
from tests.export.checkpoint.test_lora import write_lora


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m", llama_tensors(), shards=2)


def export(model: Path, out: Path, to: str = "modelopt", **choices: Any) -> Draft:
    draft = draft_export(str(model), to, **choices)
    write_draft(draft, out, inputs=InputScales(data_free=True))
    return draft


def again(out: Path, model: Path | None = None) -> Draft:
    return redraft(Manifest.read(out), out, None if model is None else str(model))


def edit(out: Path, **export: Any) -> None:
    content = json.loads((out / "quantkit.json").read_text())
    content["export"] |= export
    content["export"] = {k: v for k, v in content["export"].items() if v is not None}
    (out / "quantkit.json").write_text(json.dumps(content))


def test_a_float_draft_has_the_recorded_plan_and_the_same_tensors(
    model: Path, tmp_path: Path
) -> None:
    lora = write_lora(tmp_path / "lora", "lm_head")
    first = export(model, tmp_path / "out", short="fp4", loras=[f"{lora}:0.5"])
    second = again(tmp_path / "out")
    assert second.plan.schemes == first.plan.schemes
    assert second.plan.groups() == first.plan.groups()
    assert second.plain.keys() == first.plain.keys()
    assert second.places == first.places
    assert second.deltas.terms.keys() == first.deltas.terms.keys()
    assert [one.scale for one in second.deltas.loras] == [0.5]


def test_a_repack_is_decided_from_its_source(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "a", short="fp4")
    first = export(tmp_path / "a", tmp_path / "b", "torchao")
    second = again(tmp_path / "b")
    assert second.layout == first.layout == "modelopt"
    assert second.stored.keys() == first.stored.keys()
    assert second.plan.rows() == first.plan.rows()


def test_a_source_of_another_layout_or_format_is_another_source(
    model: Path, tmp_path: Path
) -> None:
    export(model, tmp_path / "a", short="fp4")
    export(tmp_path / "a", tmp_path / "b", "torchao")
    edit(tmp_path / "b", layout="torchao")
    with pytest.raises(QuantkitError, match="it is modelopt and was torchao"):
        again(tmp_path / "b")
    edit(tmp_path / "b", layout="modelopt")
    content = json.loads((tmp_path / "b" / "quantkit.json").read_text())
    content["plan"][0]["weight_format"] = "mxfp4"
    (tmp_path / "b" / "quantkit.json").write_text(json.dumps(content))
    with pytest.raises(QuantkitError, match="its layers have other formats"):
        again(tmp_path / "b")


@pytest.mark.parametrize("key", ["given", "layout"])
def test_a_manifest_that_does_not_say_where_it_came_from_is_refused(
    key: str, model: Path, tmp_path: Path
) -> None:
    export(model, tmp_path / "out", short="fp4")
    edit(tmp_path / "out", **{key: None})
    with pytest.raises(QuantkitError, match=r"does not say what the checkpoint was made of"):
        again(tmp_path / "out")


def test_a_plan_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    export(model, tmp_path / "out", short="fp4")
    content = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    row = next(row for row in content["plan"] if row["weight_format"])
    row["shape"] = [32, 32]
    (tmp_path / "out" / "quantkit.json").write_text(json.dumps(content))
    with pytest.raises(QuantkitError, match=r"of shape \(32, 32\).*do not belong together"):
        again(tmp_path / "out")


def test_a_copy_of_the_source_is_the_same_source_and_a_resumed_run_asks_for_more(
    model: Path, tmp_path: Path
) -> None:
    """Times are no part of the key that a manifest keeps."""
    import os

    export(model, tmp_path / "out", short="fp4")
    for file in model.glob("*.safetensors"):
        os.utime(file, (1, 1))
    assert again(tmp_path / "out").plan.schemes


def test_input_ranges_come_from_the_manifest(model: Path, tmp_path: Path) -> None:
    draft = export(model, tmp_path / "out", short="fp4")
    found = recorded_inputs(Manifest.read(tmp_path / "out"), tmp_path / "out")
    assert {name: seen.input_amax for name, seen in found.items()} == dict.fromkeys(
        draft.plan.schemes, 2688.0
    )
    edit(tmp_path / "out", input_amax=None)
    with pytest.raises(QuantkitError, match="what input scales were made of"):
        recorded_inputs(Manifest.read(tmp_path / "out"), tmp_path / "out")
