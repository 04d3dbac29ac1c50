"""A sound file has no problems; a damaged one has them all at once, errors first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit.export.checkpoint.targets import CHECKPOINT_TARGETS
from quantkit.models.quantized import open_quantized
from quantkit.models.quantized.against import compare_with
from quantkit.models.quantized.problems import RULES, find_problems
from tests.models.quantized.files import (
    PAIRS,
    READ_ONLY,
    edit,
    edit_config,
    write_float,
    write_quantized,
    write_read_only,
)


def found(path: Path) -> dict[str, list[str]]:
    """Rule -> names that it found, of a file as `quantkit inspect` opens it."""
    rules: dict[str, list[str]] = {}
    for problem in find_problems(open_quantized(path, strict=False)):
        rules.setdefault(problem.rule, []).append(problem.name)
    return rules


@pytest.mark.parametrize(
    ("to", "pair"),
    [(to, pair) for to in PAIRS for pair in sorted(CHECKPOINT_TARGETS[to].holds, key=str)],
)
def test_what_quantkit_writes_has_no_problems(
    tmp_path: Path, to: str, pair: tuple[str, str | None]
) -> None:
    assert found(write_quantized(tmp_path, to, pair)[0]) == {}


@pytest.mark.parametrize("layout", READ_ONLY)
def test_sound_files_of_other_tools_have_no_problems(tmp_path: Path, layout: str) -> None:
    path, original = write_read_only(tmp_path, layout)
    assert found(path) == {}
    opened = open_quantized(path)
    assert opened.layout == layout
    matches = compare_with(opened, original)
    assert len(matches) == len(opened.layers)
    assert all(match.fits == match.declared for match in matches)


def test_a_float_model_has_no_problems(tmp_path: Path) -> None:
    tensors = {"scale": np.zeros(4, np.float32), "logit_scale": np.float32(-1).reshape(())}
    write_float(tmp_path, {**tensors, "norm.scale": np.full(4, np.nan, np.float32)})
    assert found(tmp_path) == {}


def test_all_problems_are_named_and_errors_come_first(tmp_path: Path) -> None:
    path, _, _ = write_quantized(tmp_path, "modelopt", shared=False)
    block = "model.layers.0."

    def damage(tensors: dict) -> None:
        tensors[f"{block}mlp.up_proj.weight_scale"].view(np.uint8)[3, 1] = 0x7F
        tensors[f"{block}self_attn.o_proj.weight_scale_2"][...] = np.nan
        tensors["fp8.weight"] = tensors[f"{block}mlp.up_proj.weight_scale"].copy()

    edit(path / "model.safetensors", damage)
    edit_config(path, lambda config: config["quantization_config"]["ignore"].append("lm_haed"))
    problems = find_problems(open_quantized(path, strict=False))
    assert {problem.rule for problem in problems} == {
        *("unreadable", "bad-scale", "ignored-nothing"),
    }
    severities = [problem.severity for problem in problems]
    assert severities == sorted(severities)
    bad = [problem.name for problem in problems if problem.rule == "bad-scale"]
    assert bad == [f"{block}mlp.up_proj.weight_scale", f"{block}self_attn.o_proj.weight_scale_2"]
    assert all(problem.fix and problem.message for problem in problems)
    assert problems[0].to_json()["severity"] == "error"


def test_only_headers_and_scales_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = write_quantized(tmp_path, "compressed-tensors")
    opened = open_quantized(path)
    seen: list[str] = []
    from quantkit.models import checkpoint
    from quantkit.models.quantized import problems_config, problems_scales

    def watch(info, start, into) -> None:
        seen.append(info.name)
        checkpoint.read_bytes(info, start, into)

    monkeypatch.setattr(problems_scales, "read_bytes", watch)
    monkeypatch.setattr(problems_config, "read_bytes", watch)
    for layer in opened.layers.values():
        monkeypatch.setattr(type(layer), "rows", None, raising=False)
    find_problems(opened)
    assert seen
    assert not [n for n in seen if "scale" not in n and "embed" not in n and "head" not in n]


def test_every_rule_is_in_the_table_once() -> None:
    assert len(set(RULES)) == len(RULES) == 18
