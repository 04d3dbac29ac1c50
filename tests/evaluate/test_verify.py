"""One `verify` for every kind of folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import quantkit
from quantkit.errors import QuantkitError
from quantkit.evaluate.checkpoint import CheckpointVerification
from quantkit.evaluate.verify import verify
from quantkit.export.checkpoint.begin import draft_export
from quantkit.export.checkpoint.run import InputScales, write_draft
from tests.export.checkpoint.models import llama_tensors, write_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = write_model(tmp_path / "m", llama_tensors())
    draft = draft_export(str(model), "modelopt", short="fp4")
    write_draft(draft, tmp_path / "out", inputs=InputScales(data_free=True))
    return tmp_path / "out"


def test_a_checkpoint_is_verified_as_one_by_the_public_function(checkpoint: Path) -> None:
    result = quantkit.verify(str(checkpoint))
    assert isinstance(result, CheckpointVerification)
    assert result.passed


def test_data_to_run_a_checkpoint_on_is_refused(checkpoint: Path) -> None:
    for choices in ({"calibration": []}, {"limit": 3}):
        with pytest.raises(QuantkitError, match=r"checkpoint \(modelopt\).* not run"):
            verify(checkpoint, **choices)


def test_a_folder_of_neither_kind_is_refused(checkpoint: Path) -> None:
    manifest = checkpoint / "quantkit.json"
    manifest.write_text(manifest.read_text().replace('"modelopt"', '"quantkit"'))
    with pytest.raises(QuantkitError, match="neither a graph nor a checkpoint to verify; make one"):
        verify(checkpoint)


def test_a_checkpoint_is_verified_without_torch(checkpoint: Path) -> None:
    code = (
        "import sys, quantkit; r = quantkit.verify(sys.argv[1]); "
        "sys.exit(not r.passed or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint)], check=False)
    assert done.returncode == 0
