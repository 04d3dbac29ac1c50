"""What lies on disk: one model file, one data file, written once, tensor by tensor."""

from __future__ import annotations

import errno
import json
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from quantkit.errors import QuantkitError
from quantkit.export.onnx.save import DATA_FILE, MODEL_FILE, check, save
from quantkit.numerics.qtensor import QTensor
from tests.export.modules import MLP, SINGLE, Mlp
from tests.export.toys import SCHEMES, Toy, make_toy

X = {"x": torch.randn(2, 8, 64)}


def count_loads(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    loads: Counter[str] = Counter()
    original = toy.weights._quantize

    def counted(name: str) -> QTensor:
        loads[name] += 1
        return original(name)

    monkeypatch.setattr(toy.weights, "_quantize", counted)
    return loads


@pytest.mark.parametrize("dialect", ["tensorrt", "standard"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_weight_is_quantized_once(
    scheme: str, dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lazy scalar scale, written in a later phase, would quantize every weight twice."""
    toy = make_toy(MLP, X, scheme, dialect=dialect)
    loads = count_loads(toy, monkeypatch)
    toy.quantize().save(tmp_path)
    assert loads == {"q": 1, "k": 1, "o": 1}


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def test_memory_follows_the_largest_tensor_and_not_the_model(tmp_path: Path) -> None:
    peaks = []
    for layers in (2, 12):
        toy = make_toy(Deep(layers), {"x": torch.randn(1, 4, 512)}).quantize()
        tracemalloc.start()
        save(toy.graph, tmp_path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    codes = 512 * 512 // 2
    assert peaks[1] - peaks[0] < 2 * codes, "ten more layers hold at most a graph's worth more"


def test_numbers_lie_in_one_data_file_and_constants_in_the_model(tmp_path: Path) -> None:
    path = make_toy(MLP, X).quantize().save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [MODEL_FILE, DATA_FILE]
    model = onnx.load(path, load_external_data=False)
    external = {
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }
    assert {"q.weight", "q.weight_scale", "q.bias", "norm.weight"} <= external
    assert not {"q.weight_scale_2", "q.input_scale"} & external
    assert {entry.value for t in model.graph.initializer for entry in t.external_data
            if entry.key == "location"} == {DATA_FILE}  # fmt: skip


def test_the_folder_may_be_moved(tmp_path: Path) -> None:
    """The location is relative, whatever the working directory was (C22)."""
    (tmp_path / "a").mkdir()
    toy = make_toy(SINGLE, X).quantize()
    toy.save(tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    check(tmp_path / "b" / MODEL_FILE)
    model = onnx.load(tmp_path / "b" / MODEL_FILE)
    codes = next(t for t in model.graph.initializer if t.name == "fc.weight")
    assert codes.raw_data == toy.weights.load("fc").data.tobytes()


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Mlp()
    written = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make_toy(module, X).quantize().save(tmp_path / name)
        written.append([file.read_bytes() for file in sorted((tmp_path / name).iterdir())])
    assert written[0] == written[1]


def test_the_file_says_what_was_asked_of_each_layer(tmp_path: Path) -> None:
    """An audit needs nothing but the ONNX file."""
    toy = make_toy(MLP, X, "fp8").quantize()
    model = onnx.load(toy.save(tmp_path), load_external_data=False)
    properties = {entry.key: entry.value for entry in model.metadata_props}
    assert properties["quantkit.version"] == "test"
    rows = json.loads(properties["quantkit.layers"])
    assert rows == toy.rows
    first = rows[0]
    assert (first["layer"], first["node"]) == ("q", "q")
    assert (first["weight_format"], first["input_format"]) == ("fp8_channel", "fp8")
    names = {node.name for node in model.graph.node}
    assert {row["node"] for row in rows} <= names


def test_the_file_knows_nothing_of_the_machine(tmp_path: Path) -> None:
    """The exporter leaves stack traces with file paths on every node."""
    content = make_toy(MLP, X).quantize().save(tmp_path).read_bytes()
    assert b".py" not in content
    assert b"pkg.torch" not in content


def test_saving_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    toy = make_toy(SINGLE, X).quantize()
    before = {n: v.const_value for n, v in toy.graph.graph.initializers.items()}
    save(toy.graph, tmp_path)
    assert {n: v.const_value for n, v in toy.graph.graph.initializers.items()} == before


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ir.external_data, "convert_tensors_to_external", full)
    with pytest.raises(QuantkitError, match=r"cannot write .*No space left on device"):
        save(make_toy(SINGLE, X).quantize().graph, tmp_path)


def test_progress_counts_tensors(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    save(
        make_toy(SINGLE, X).quantize().graph,
        tmp_path,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_declared_dtype_that_the_graph_does_not_compute_is_found(tmp_path: Path) -> None:
    toy = make_toy(SINGLE, X, dtype=torch.bfloat16).quantize()
    toy.graph.graph.outputs[0].dtype = ir.DataType.FLOAT
    with pytest.raises(QuantkitError, match=r"'output' is declared FLOAT and computed as BFLOAT16"):
        check(save(toy.graph, tmp_path))


def test_a_model_beyond_two_gibibytes_is_no_special_case(tmp_path: Path) -> None:
    """No tensor read on demand is ever inside the protobuf message (C21)."""
    toy = make_toy(Deep(4), {"x": torch.randn(1, 4, 512)}).quantize()
    path = toy.save(tmp_path)
    data = sum(v.const_value.nbytes for v in toy.graph.graph.initializers.values() if v.const_value)
    assert path.stat().st_size < 20_000 < data
    assert np.isclose((tmp_path / DATA_FILE).stat().st_size, data, atol=1024)


def test_a_short_write_is_said_to_be_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: object) -> None:
        raise OSError("4096 requested and 0 written")

    monkeypatch.setattr(ir.external_data, "convert_tensors_to_external", short)
    with pytest.raises(QuantkitError, match=r"the disk is full.*; free space"):
        make_toy(MLP, X, "nvfp4").quantize().save(tmp_path)
