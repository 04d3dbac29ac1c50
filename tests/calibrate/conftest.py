from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.models.model_source import Source
from quantkit.models.source import open_model
from tests.calibrate.sources import image_source, text_source, write_pipeline
from tests.zoo import write_diffusers


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return text_source(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return image_source(tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="session")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_model(write_diffusers("flux", tmp_path_factory.mktemp("flux")))


@pytest.fixture(scope="session")
def pipeline_unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("sd"))
