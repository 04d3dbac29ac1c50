"""quantkit's own folder, read back by the library of the file format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from quantkit.export.quantkit import write_quantkit
from quantkit.models.source import open_model
from quantkit.models.trace import Traced, trace
from quantkit.numerics.qtensor import QTensor
from quantkit.prepare import Prepared, prepare
from quantkit.weights import Weights
from tests.artefacts import plan_traced, random_batches, write_net


def silent(done: int, total: int) -> None:
    assert 0 < done <= total


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return trace(open_model(write_net(tmp_path_factory.mktemp("net"))))


@pytest.fixture
def prepared(traced: Traced) -> Callable[[str], Prepared]:
    return lambda recipe: prepare(
        plan_traced(traced, recipe), calibration=random_batches(traced.source)
    )


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8-weight-only"])
def test_every_layer_is_there_as_the_library_reads_it(
    recipe: str, prepared: Callable[[str], Prepared], tmp_path: Path
) -> None:
    made = prepared(recipe)
    written = write_quantkit(made.weights, tmp_path, silent)
    path = tmp_path / "weights.safetensors"
    assert written["target"] == "quantkit"
    assert written["files"] == [{"name": path.name, "bytes": path.stat().st_size}]
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "quantkit"}
        assert len(made.weights) == 6
        names = set()
        for layer in made.weights:
            expected: QTensor = made.weights.load(layer)
            parts = {"data": expected.data, "scale": expected.scale}
            if expected.tensor_scale is not None:
                parts["tensor_scale"] = np.asarray(expected.tensor_scale)
            for suffix, array in parts.items():
                stored = file.get_tensor(f"{layer}.{suffix}")
                assert stored.dtype == array.dtype
                assert stored.shape == array.shape
                assert np.array_equal(stored, array)
                names.add(f"{layer}.{suffix}")
        assert set(file.keys()) == names


def test_every_weight_is_quantized_once(
    prepared: Callable[[str], Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = prepared("nvfp4")
    loads: Counter[str] = Counter()
    quantize = Weights._quantize

    def counted(self: Weights, name: str) -> QTensor:
        loads[name] += 1
        return quantize(self, name)

    monkeypatch.setattr(Weights, "_quantize", counted)
    write_quantkit(made.weights, tmp_path, silent)
    assert loads == Counter(made.weights)
