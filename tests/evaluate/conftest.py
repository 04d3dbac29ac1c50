"""Zoo models exported once for all tests of this folder; a test that damages one copies it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor, nn

from quantkit.export.onnx import export_onnx
from quantkit.models.source import Source
from quantkit.models.trace import Traced
from quantkit.prepare import prepare
from quantkit.weights import Weights
from tests.artefacts import File, plan_traced, random_batches

# Sizes other than those of the trace, an odd number of tokens among them.
OTHER = {"batch": 1, "sequence": 9}


@dataclass(frozen=True)
class Ready:
    """A model with the quantized numbers of one recipe, and no file."""

    source: Source
    module: nn.Module
    weights: Weights


@dataclass(frozen=True)
class Exported(Ready):
    """An exported graph and what it must equal. batches: of the traced shape and of another."""

    rows: Sequence[Mapping[str, Any]]
    file: File
    batches: list[dict[str, Tensor]]


@pytest.fixture(scope="session")
def ready(
    opened: Callable[[str], Source], traced: Callable[[str], Traced]
) -> Callable[[str, str], Ready]:
    made: dict[tuple[str, str], Ready] = {}

    def get(name: str, recipe: str) -> Ready:
        if (name, recipe) not in made:
            source = opened(name)
            planned = plan_traced(traced(name), recipe)
            prepared = prepare(planned, calibration=random_batches(source))
            made[name, recipe] = Ready(source, source.load().float(), prepared.weights)
        return made[name, recipe]

    return get


@pytest.fixture(scope="session")
def exported(
    ready: Callable[[str, str], Ready],
    traced: Callable[[str], Traced],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], Exported]:
    made: dict[tuple[str, str], Exported] = {}

    def get(name: str, recipe: str) -> Exported:
        if (name, recipe) not in made:
            parts = ready(name, recipe)
            folder = tmp_path_factory.mktemp(f"{name}-{recipe}")
            written = export_onnx(traced(name), parts.weights, folder)
            made[name, recipe] = Exported(
                parts.source,
                parts.module,
                parts.weights,
                written["layers"],
                File(folder / "model.onnx"),
                [*random_batches(parts.source, 1), *random_batches(parts.source, 1, **OTHER)],
            )
        return made[name, recipe]

    return get
