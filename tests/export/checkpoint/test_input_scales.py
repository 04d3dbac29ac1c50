from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.input_scales import default_stats, read_input_stats
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.scales import input_scale_for


def write(folder: Path, **amax: float | None) -> Path:
    rows = {name: {"weight_amax": 1.0, "input_amax": value} for name, value in amax.items()}
    (folder / "stats.json").write_text(json.dumps(rows))
    return folder


def test_the_default_is_a_scale_of_one() -> None:
    stats = default_stats({"a": FORMATS["nvfp4"], "b": FORMATS["fp8"]})
    for name, fmt in (("a", "nvfp4"), ("b", "fp8")):
        amax = stats[name].input_amax
        assert amax is not None
        assert input_scale_for(amax, FORMATS[fmt]) == 1


@pytest.mark.parametrize(
    ("recorded", "asked"),
    [("a.b", "a.b"), ("a.b", "model.a.b"), ("model.a.b", "a.b"), ("x.a.b", "a.b")],
)
def test_a_prefix_of_the_module_or_of_the_checkpoint_does_not_matter(
    recorded: str, asked: str, tmp_path: Path
) -> None:
    assert read_input_stats(write(tmp_path, **{recorded: 2.5}), [asked])[asked].input_amax == 2.5


def test_a_name_that_two_layers_end_in_is_not_guessed(tmp_path: Path) -> None:
    folder = write(tmp_path, **{"x.a": 1.0, "y.a": 2.0})
    with pytest.raises(QuantkitError, match="no input range for a"):
        read_input_stats(folder, ["a"])


def test_a_layer_that_was_not_calibrated_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, a=1.0, b=None)
    with pytest.raises(QuantkitError, match="no input range for b"):
        read_input_stats(folder, ["a", "b"])


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', '{"a": {}}', '{"a": {"input_amax": "x"}}', "{"])
def test_a_damaged_file_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "stats.json").write_text(text)
    with pytest.raises(QuantkitError, match=r"stats\.json"):
        read_input_stats(tmp_path, ["a"])
