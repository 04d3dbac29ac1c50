"""Every architecture through the whole pipeline: export, verify, lint, build, audit.

No per-model code: what differs between the models is data. The whole zoo is slow; one encoder and
one decoder stay in the default run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.engines.audit import audit
from quantkit.engines.build import build
from quantkit.engines.lint import lint
from quantkit.evaluate.parity import TOLERANCE
from quantkit.evaluate.verify import verify
from quantkit.export.run import export_model
from quantkit.models.source import open_model
from tests.zoo import ZOO

QUICK = ("bert", "llama")
EVERY = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(ZOO)
]


def check(spec: str, out: Path, *, emulated: bool = False, **choice: str) -> None:
    """Export, then hold the result to what the project promises."""
    source = open_model(spec)
    manifest = export_model(source, out, calibration=[source.example().kwargs], **choice)
    asked = {row["layer"] for row in manifest.plan if row["weight_format"]}
    assert asked
    proof = verify(out, calibration=[source.example(seed=7).kwargs])
    assert proof.passed
    assert proof.weights["identical"] == proof.weights["checked"] == len(asked)
    assert max(layer["relative_l2"] for layer in proof.layers) < TOLERANCE
    assert proof.worst(input_quantizers=False)["relative_l2"] < TOLERANCE
    for index, run in enumerate(run for run in proof.runs if run["input_quantizers"]):
        flipped = sum(layer["flipped_codes"][index] for layer in proof.layers)
        if not flipped:
            assert max(output["relative_l2"] for output in run["outputs"]) < TOLERANCE
    assert not [f for f in lint(out / "model.onnx") if f.severity == "error"]
    engine = build(out / "model.onnx", allow_emulated=emulated)
    result = audit(out / engine.engine, out / "model.onnx")
    assert {layer.layer for layer in result.layers} == asked
    assert result.count("emulated" if emulated else "ok") == len(result.layers), result.headline


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("short", ["fp4", "fp8"])
def test_every_architecture_exports_verifies_builds_and_audits(
    name: str, short: str, tmp_path: Path
) -> None:
    check(ZOO[name](tmp_path / "model"), tmp_path / "out", short=short)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("short", ["fp4", "fp8"])
@pytest.mark.parametrize("name", ["bert", "flux", "gpt2", "t5_encoder"])
def test_half_precision_models_keep_their_dtype(
    name: str, short: str, dtype: str, tmp_path: Path
) -> None:
    check(ZOO[name](tmp_path / "model"), tmp_path / "out", short=short, compute_dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4-weight-only"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_formats_the_target_only_emulates_say_so(name: str, recipe: str, tmp_path: Path) -> None:
    check(ZOO[name](tmp_path / "model"), tmp_path / "out", recipe=recipe, emulated=True)
