"""From a path, an iterable or nothing to batches that fit the model, and where they came from."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from quantkit.calibrate.arrays import batch_bytes
from quantkit.calibrate.data import load_batches
from quantkit.calibrate.observe import calibrate
from quantkit.calibrate.samples import Split
from quantkit.errors import QuantkitError
from quantkit.models.model_source import Source
from quantkit.models.source import open_model
from tests.calibrate.models import linears
from tests.calibrate.sources import LETTERS, text_source
from tests.calibrate.test_images import photo

SHIPPED = Path(__file__).parents[2] / "calibration"
BOTH: tuple[Split, Split] = ("calibration", "held_out")

FUNCTION = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(16, 4)), {"input": torch.ones(2, 16)}, {"input": {0: "batch"}}
"""


@pytest.fixture
def function(tmp_path: Path) -> Source:
    (tmp_path / "model.py").write_text(FUNCTION)
    return open_model(f"{tmp_path / 'model.py'}:model")


@pytest.mark.parametrize("name", ["text", "prompts"])
def test_shipped_splits_share_no_line(name: str) -> None:
    used = (SHIPPED / f"{name}.txt").read_text().splitlines()
    held_out = (SHIPPED / f"{name}_held_out.txt").read_text().splitlines()
    assert not set(used) & set(held_out)
    assert len(set(used)) == len(used)
    assert len(set(held_out)) == len(held_out)


def test_a_language_model_gets_the_text_that_ships(bert: Source) -> None:
    batches, description = load_batches(None, bert)
    lines = (SHIPPED / "text.txt").read_text().splitlines()
    assert description["source"] == "built in"
    assert description["samples"] == len(lines) >= 140
    assert description["batches"] == len(batches) == -(-len(lines) // 8)
    assert description["description"] == f"{len(lines)} texts"
    assert description["warning"] is None
    assert list(batches[0]) == ["input_ids", "attention_mask"]
    json.dumps(description)


def test_a_vision_model_gets_drawn_images(vit: Source) -> None:
    batches, description = load_batches(None, vit, limit=6)
    assert [batch["pixel_values"].shape[0] for batch in batches] == [4, 2]
    assert description["samples"] == 6
    assert description["warning"] is None


def test_a_pipeline_runs_the_prompts_that_ship(pipeline_unet: Path) -> None:
    source = open_model(str(pipeline_unet.parent))
    batches, description = load_batches(None, source, limit=1)
    assert description["description"] == "1 prompts run through the pipeline, 8 steps each"
    assert len(batches) == 8
    assert description["warning"] is None


def test_a_model_of_unknown_task_gets_random_inputs_and_a_loud_warning(function: Source) -> None:
    batches, description = load_batches(None, function)
    assert description["source"] == "random"
    assert description["warning"] is not None
    assert "NO CALIBRATION DATA" in description["warning"]
    assert "Sequential" in description["warning"]
    assert [tuple(batch["input"].shape) for batch in batches] == [(2, 16)] * 4


def test_a_bare_denoiser_says_that_its_pipeline_would_do(flux: Source, tmp_path: Path) -> None:
    _, description = load_batches(None, flux)
    assert description["warning"] is not None
    assert "open the whole pipeline" in description["warning"]
    (tmp_path / "p.txt").write_text("a fox\n")
    with pytest.raises(QuantkitError, match="need the pipeline's text encoders"):
        load_batches(tmp_path / "p.txt", flux)


def test_held_out_data_is_disjoint_by_content_whatever_the_source(
    vit: Source, flux: Source, function: Source, tmp_path: Path
) -> None:
    bert = text_source(tmp_path / "bert", words=LETTERS)  # tells any two sentences apart
    (tmp_path / "t.txt").write_text("\n".join(f"the of {word} " * 3 for word in "abcdefg"))
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": "and " * n}) for n in range(9)))
    (tmp_path / "images").mkdir()
    for seed in range(6):
        photo(40, 40, seed).save(tmp_path / "images" / f"{seed}.png")
    np.savez(tmp_path / "a.npz", input=np.random.default_rng(0).normal(size=(10, 16)))
    given = [{"input": torch.randn(2, 16)} for _ in range(6)]
    for source, spec in (
        (bert, None), (vit, None), (flux, None), (function, None), (function, given),
        (bert, tmp_path / "t.txt"), (bert, str(tmp_path / "t.jsonl")), (vit, tmp_path / "images"),
        (function, tmp_path / "a.npz"),
    ):  # fmt: skip
        found = [load_batches(spec, source, split=split) for split in BOTH]
        # Row by row: two batches may differ and still share a sentence.
        used, held_out = (
            {row.numpy().tobytes() for batch in batches for row in next(iter(batch.values()))}
            for batches, _ in found
        )
        assert used, spec
        assert held_out, spec
        assert not used & held_out, spec
        assert found[0][1]["content_key"] != found[1][1]["content_key"]
        assert [description["split"] for _, description in found] == list(BOTH)


def test_the_same_data_gives_the_same_key_and_batches(bert: Source) -> None:
    (first, one), (second, two) = (load_batches(None, bert, limit=9) for _ in range(2))
    assert one == two
    assert [batch_bytes(b) for b in first] == [batch_bytes(b) for b in second]
    assert load_batches(None, bert, limit=8)[1]["content_key"] != one["content_key"]


def test_limit_counts_samples(bert: Source, function: Source, tmp_path: Path) -> None:
    assert load_batches(None, bert, limit=11)[1]["samples"] == 11
    np.savez(tmp_path / "a.npz", input=np.random.default_rng(0).normal(size=(50, 16)))
    assert load_batches(tmp_path / "a.npz", function, limit=3)[1]["samples"] == 3
    endless = ({"input": torch.full((1, 16), float(index))} for index in count())
    assert load_batches(endless, function, limit=3)[1]["samples"] == 3
    with pytest.raises(QuantkitError, match="limit is 0"):
        load_batches(None, bert, limit=0)


def test_floats_come_in_the_compute_dtype_and_time_steps_stay_float32(flux: Source) -> None:
    batches, _ = load_batches([flux.example().kwargs] * 2, flux, dtype=torch.bfloat16)
    assert batches[0]["hidden_states"].dtype == torch.bfloat16
    assert batches[0]["timestep"].dtype == torch.float32


def test_what_comes_out_calibrates_the_model(bert: Source, vit: Source) -> None:
    for source in (bert, vit):
        batches, _ = load_batches(None, source, limit=9)
        module = source.load(torch.float32)
        result = calibrate(module, batches, linears(module), call=source.call)
        assert set(result.uncalibrated) <= {"pooler.dense"}
        assert all(s.input_amax and np.isfinite(s.input_amax) for s in result.stats.values())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "does not exist"),
        ("data.csv", "a,b", "unknown suffix"),
        ("empty.txt", " \n", "no calibration sample"),
        ("a.npz", "not an archive", "not a readable"),
    ],
)
def test_data_of_no_use_is_one_clear_error(
    bert: Source, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(QuantkitError, match=message):
        load_batches(tmp_path / name, bert)


def test_data_of_the_wrong_kind_names_what_the_model_takes(
    bert: Source, vit: Source, function: Source, tmp_path: Path
) -> None:
    (tmp_path / "t.txt").write_text("one\ntwo\n")
    with pytest.raises(QuantkitError, match=r"text cannot calibrate ViT.*takes pixel_values"):
        load_batches(tmp_path / "t.txt", vit)
    with pytest.raises(QuantkitError, match=r"images cannot calibrate BertModel"):
        load_batches(tmp_path, bert)
    with pytest.raises(
        QuantkitError, match=r"batch 1 is a list; give dicts of tensors .*\(input\)"
    ):
        load_batches([{"input": torch.ones(2, 16)}, [1]], function)  # type: ignore[list-item]
    with pytest.raises(QuantkitError, match="no calibration sample"):
        load_batches(tmp_path, vit)


def test_shipped_data_is_found_inside_an_installed_package(
    bert: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel carries calibration/ as quantkit/calibration_data."""
    inside = tmp_path / "quantkit" / "calibration_data"
    inside.mkdir(parents=True)
    (inside / "text.txt").write_text("the\nof\n")
    monkeypatch.setattr("quantkit.calibrate.data.files", lambda package: tmp_path / package)
    assert load_batches(None, bert)[1]["samples"] == 2
