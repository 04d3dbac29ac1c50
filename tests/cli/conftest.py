from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.cli.run import quantkit
from tests.zoo import write_transformers


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT without a tokenizer. To be read only."""
    return Path(write_transformers("bert", tmp_path_factory.mktemp("model") / "bert"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibration data for it."""
    file = tmp_path_factory.mktemp("data") / "calibration.npz"
    ids = np.random.default_rng(0).integers(0, 96, (16, 8))
    np.savez(file, input_ids=ids, attention_mask=np.ones((16, 8), np.int64))
    return file


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, bert: Path, data: Path) -> Path:
    """`quantkit export --fp4` of the tiny BERT. To be read only."""
    folder = tmp_path_factory.mktemp("exported") / "out"
    done = quantkit("export", "--fp4", bert, "-o", folder, "--calibration", data, "--limit", 4)
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def artefact(exported: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(exported, tmp_path / "artefact"))


@pytest.fixture
def model(bert: Path, tmp_path: Path) -> Path:
    """A copy of the tiny BERT that a test may damage."""
    return Path(shutil.copytree(bert, tmp_path / "model"))
