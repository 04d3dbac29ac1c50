from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit.models.checkpoint import Checkpoint
from tests.cli.run import quantkit, refusal, unchanged


def garble(file: Path) -> None:
    """Keep the safetensors header, make every value NaN."""
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start:] = b"\xff" * (len(data) - start)
    file.write_bytes(data)


def test_a_dry_run_reads_headers_only(model: Path, tmp_path: Path) -> None:
    """With every weight NaN the plan is as before."""
    intact = quantkit("export", "--fp4", model, "--dry-run", "--json")
    garble(model / "model.safetensors")
    assert np.isnan(Checkpoint(model).read("pooler.dense.weight")).all()
    with unchanged(tmp_path):
        garbled = quantkit("export", "--fp4", model, "--dry-run", "--json")
    assert garbled.code == 0
    assert garbled.json == intact.json


@pytest.mark.parametrize("command", ["quantize", "export"])
def test_a_dry_run_reads_no_weight_and_shows_plan_sizes_and_memory(
    bert: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: pytest.fail(f"read {name}"))
    result = quantkit(command, "--fp4", bert, "--dry-run")
    assert result.code == 0
    table, _, rest = result.out.partition("\n\nstays in high precision:\n")
    assert len(table.splitlines()) == 2 + 12
    assert "encoder.layer.0.attention.self.query    64x64   nvfp4   nvfp4  16.4 kB  2.3 kB" in table
    assert "5 x norm: tiny" in rest
    assert "... (2 more)" in rest
    assert "weights: 321.3 kB before, 96.0 kB after" in rest
    assert "expected peak memory: " in rest
    assert "--fp4 picked nvfp4; BertModel, feature-extraction" in result.lines
    assert result.lines[-1] == f"next: quantkit {command} --fp4 {bert} -o OUT"


def test_the_plan_as_json_has_every_layer_with_its_bytes(bert: Path) -> None:
    result = quantkit("export", "--recipe", "fp8-weight-only", bert, "--dry-run", "--json", "-q")
    assert (result.code, result.err) == (0, "")
    plan = result.json
    assert plan.keys() == {"plan", "coverage", "expected_peak_memory", "rules"}
    assert len(plan["plan"]) == 21
    before, after = (
        sum(row[f"bytes_{when}"] for row in plan["plan"]) for when in ("before", "after")
    )
    assert (before, after) == (plan["coverage"]["bytes_before"], plan["coverage"]["bytes_after"])
    assert 1e8 < plan["expected_peak_memory"] < 1e10
    assert sum(rule["decided"] for rule in plan["rules"]) <= 21


def test_verbose_names_every_kept_layer_and_the_run_suggested_is_what_was_asked(
    bert: Path,
) -> None:
    result = quantkit("export", "--recipe", "mxfp8", bert, "--dry-run", "-v", "-o", "my folder")
    assert "encoder.layer.1.output.LayerNorm" in result.out
    assert "more)" not in result.out
    assert result.lines[-1] == f"next: quantkit export --recipe mxfp8 {bert} -v -o 'my folder'"
    more = ("--to", "modelopt", "--data-free", "--threads", "1")
    result = quantkit("export", "--fp4", *more, bert, "--dry-run")
    wanted = f"next: quantkit export --fp4 {' '.join(more)} {bert} -o OUT"
    assert result.lines[-1] == wanted, "an option left out would make another model"


def test_a_choice_of_recipe_is_needed(bert: Path) -> None:
    assert "--fp4, --fp8 or --recipe" in refusal("export", bert, "--dry-run")
