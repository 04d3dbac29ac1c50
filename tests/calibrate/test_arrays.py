"""Archives of arrays become batches; no data becomes random values that are valid inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quantkit.calibrate.arrays import array_batches, batch_bytes, random_batches, read_arrays
from quantkit.errors import QuantkitError
from quantkit.models.examples import Example
from quantkit.models.model_source import Source

DYNAMIC = Example(
    {"x": torch.zeros(2, 8), "y": torch.zeros(2)}, {"x": {0: "batch"}, "y": {0: "batch"}}
)
FIXED = Example({"x": torch.zeros(2, 8)}, {"x": {}})


def test_npz_and_safetensors_hold_the_same(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.savez(tmp_path / "a.npz", x=x)
    save_file({"x": torch.from_numpy(x)}, tmp_path / "a.safetensors")
    for name in ("a.npz", "a.safetensors"):
        assert torch.equal(read_arrays(tmp_path / name)["x"], torch.from_numpy(x))


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_a_damaged_archive_is_one_clear_error(tmp_path: Path, name: str) -> None:
    for content in (b"", b"PK\x03\x04broken", b"\x08\x00\x00\x00\x00\x00\x00\x00{broken}"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(QuantkitError, match="not a readable"):
            read_arrays(tmp_path / name)


def test_python_objects_in_an_archive_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(QuantkitError, match="not a readable"):
        read_arrays(tmp_path / "a.npz")


def test_rows_become_batches_of_one_where_the_batch_may_vary() -> None:
    x, y = torch.randn(5, 8), torch.arange(5.0)
    batches = array_batches({"x": x, "y": y}, DYNAMIC, "a.npz")
    assert [tuple(batch["x"].shape) for batch in batches] == [(1, 8)] * 5
    assert torch.equal(torch.cat([batch["x"] for batch in batches]), x)
    assert torch.equal(torch.cat([batch["y"] for batch in batches]), y)


def test_rows_fill_batches_of_a_fixed_size() -> None:
    batches = array_batches({"x": torch.randn(5, 8)}, FIXED, "a.npz")
    assert [tuple(batch["x"].shape) for batch in batches] == [(2, 8)] * 2
    assert len(array_batches({"x": torch.randn(2, 8)}, FIXED, "a.npz")) == 1
    with pytest.raises(QuantkitError, match=r"1 samples of 'x', the model takes batches of 2"):
        array_batches({"x": torch.randn(1, 8)}, FIXED, "a.npz")


def test_an_input_without_a_batch_axis_goes_whole_into_each_batch(flux: Source) -> None:
    """FLUX's position ids belong to all samples."""
    example = flux.example()
    arrays = {
        name: value if name in ("img_ids", "txt_ids") else torch.cat([value, value])
        for name, value in example.kwargs.items()
    }
    batches = array_batches(arrays, example, "a.npz")
    assert len(batches) == 4
    assert torch.equal(batches[3]["img_ids"], example.kwargs["img_ids"])
    assert batches[3]["hidden_states"].shape[0] == 1


def test_inputs_that_disagree_on_the_number_of_samples_are_refused() -> None:
    with pytest.raises(QuantkitError, match=r"a\.npz: .* number of samples: x 5, y 4"):
        array_batches({"x": torch.randn(5, 8), "y": torch.randn(4)}, DYNAMIC, "a.npz")


def test_batches_are_the_same_when_names_shapes_and_values_are() -> None:
    one = {"x": torch.ones(2, 3), "y": torch.zeros(1)}
    assert batch_bytes(one) == batch_bytes({"y": torch.zeros(1), "x": torch.ones(2, 3)})
    assert batch_bytes(one) != batch_bytes(one | {"x": torch.ones(3, 2)})
    assert batch_bytes(one) != batch_bytes(one | {"x": torch.full((2, 3), 2.0)})
    assert batch_bytes(one) != batch_bytes(one | {"x": torch.ones(2, 3, dtype=torch.bfloat16)})


def test_made_up_values_stay_in_the_ranges_that_the_example_shows() -> None:
    example = Example(
        {
            "ids": torch.tensor([[3, 90], [7, 8]]),
            "mask": torch.ones(2, 2, dtype=torch.int64),
            "t": torch.tensor([4.0, 900.0]),
            "x": torch.randn(64, 64) * 5 + 2,
            "constant": torch.ones(64, 64),
            "flag": torch.tensor([True]),
        },
        {},
    )
    first, again, other = (random_batches(example, seed) for seed in (0, 0, 1))
    assert len(first) == 4
    for batch, same in zip(first, again, strict=True):
        assert batch_bytes(batch) == batch_bytes(same)
    assert batch_bytes(first[0]) != batch_bytes(first[1])
    assert batch_bytes(first[0]) != batch_bytes(other[0])
    for batch in first:
        assert 3 <= batch["ids"].min() <= batch["ids"].max() <= 90
        assert batch["mask"].eq(1).all()
        assert 4 <= batch["t"].min() <= batch["t"].max() <= 900
        assert abs(batch["x"].mean() - 2) < 1
        assert 4 < batch["x"].std() < 6
        assert 0.9 < batch["constant"].std() < 1.1
        assert {k: v.dtype for k, v in batch.items()} == {
            k: v.dtype for k, v in example.kwargs.items()
        }
