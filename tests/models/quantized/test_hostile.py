"""Whatever a quantized checkpoint's tensors and configuration say: one QuantkitError, or an answer.

The header is sound here; names, dtypes, shapes, values and config.json are not (case C28).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.targets import CHECKPOINT_TARGETS
from quantkit.models.checkpoint import DTYPES, Checkpoint
from quantkit.models.quantized import open_quantized
from quantkit.models.quantized.against import compare_with
from quantkit.models.quantized.problems import find_problems
from quantkit.models.quantized.summary import summarize
from tests.models.quantized.files import (
    PAIRS,
    READ_ONLY,
    rewrite,
    write_quantized,
    write_read_only,
)

ALL: list[tuple[str, tuple[str, str | None] | None]] = [
    (to, pair) for to in PAIRS for pair in sorted(CHECKPOINT_TARGETS[to].holds, key=str)
]
ALL += [(layout, None) for layout in READ_ONLY]
JUNK = st.sampled_from(
    [
        None,
        0,
        -1,
        3.5,
        True,
        "",
        "fp8",
        "NVFP4",
        "*",
        "re:(",
        [],
        {},
        [None],
        [[]],
        {"a": 1},
        1 << 60,
    ]
)


class Files(dict[Any, tuple[Path, Checkpoint]]):
    """Choice -> (what to open, its original); short when an error shows it."""

    def __repr__(self) -> str:
        return "files"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_all(tmp_path_factory.mktemp("sound"))


def write_all(folder: Path) -> Files:
    found = Files()
    for number, choice in enumerate(ALL):
        to, pair = choice
        if pair is None:
            found[choice] = write_read_only(folder / str(number), to)
        else:
            path, _, original = write_quantized(folder / str(number), to, pair)
            found[choice] = (path, original)
    return found


def damaged(draw: st.DrawFn, array: NDArray[Any]) -> NDArray[Any]:
    """The tensor with another dtype, shape or values."""
    kind = draw(st.sampled_from(["dtype", "cut", "flat", "more", "axes", "values", "empty"]))
    if kind == "dtype":
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        size = array.nbytes // dtype.itemsize
        return np.frombuffer(array.tobytes()[: size * dtype.itemsize], dtype)
    if kind == "cut" and array.ndim:
        return array[: array.shape[0] // 2]
    if kind == "flat":
        return array.reshape(-1)
    if kind == "more":
        return np.concatenate([array.reshape(-1)] * 2)
    if kind == "axes":
        return array.reshape(1, *array.shape, 1)
    if kind == "empty":
        return array.reshape(-1)[:0].reshape(0, *array.shape[1:])
    data = bytearray(array.tobytes())
    for _ in range(3):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.sampled_from([0, 0x7F, 0x80, 0xFF]))
    return np.frombuffer(bytes(data), array.dtype).reshape(array.shape)


def poison(draw: st.DrawFn, value: Any) -> Any:
    """JSON with something else somewhere."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 5)) == 0:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: poison(draw, value[key])}
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], poison(draw, value[at]), *value[at + 1 :]]
    return draw(JUNK)


def check(path: Path, original: Checkpoint) -> None:
    try:
        opened = open_quantized(path, strict=False)
    except QuantkitError:
        return
    for problem in find_problems(opened):
        assert problem.message
    assert summarize(opened).bytes >= 0
    for layer in opened.layers.values():
        try:
            layer.load()
        except QuantkitError:
            continue
    try:
        compare_with(opened, original)
    except QuantkitError:
        return


def run(files: Files, folder: Path, choice: Any, data: st.DataObject) -> None:
    path, original = files[choice]
    shutil.rmtree(folder, ignore_errors=True)
    source = path if path.is_dir() else path.parent
    shutil.copytree(source, folder)
    file = folder / "model.safetensors" if path.is_dir() else folder / path.name
    checkpoint = Checkpoint(file)
    tensors = {name: checkpoint.read(name) for name in checkpoint.infos}
    metadata = dict(checkpoint.metadata)

    @st.composite
    def change(draw: st.DrawFn) -> None:
        layers = sorted(
            n for n in tensors if ".mlp." in n or ".self_attn." in n or n == "scaled_fp8"
        )
        for _ in range(draw(st.integers(0, 2))):
            name = draw(st.sampled_from(layers))
            kind = draw(st.sampled_from(["damage", "damage", "damage", "drop", "rename"]))
            if name not in tensors:
                continue
            if kind == "damage":
                tensors[name] = damaged(draw, tensors[name])
            else:
                array = tensors.pop(name)
                if kind == "rename":
                    tensors[name + draw(st.sampled_from(["x", ".weight", "_scale", "_2"]))] = array
        for key in sorted(metadata):
            if key != "format" and draw(st.integers(0, 3)) == 0:
                try:
                    content = json.loads(metadata[key])
                except ValueError:
                    continue
                metadata[key] = json.dumps(poison(draw, content))
        for name in ("config.json", "hf_quant_config.json"):
            if (folder / name).is_file() and draw(st.booleans()):
                content = json.loads((folder / name).read_text())
                entry = "quantization_config" if name == "config.json" else "quantization"
                if entry in content:
                    content[entry] = poison(draw, content[entry])
                (folder / name).write_text(json.dumps(content))

    data.draw(change())
    rewrite(
        file, {n: np.ascontiguousarray(a).reshape(a.shape) for n, a in tensors.items()}, metadata
    )
    check(folder if path.is_dir() else file, original)


SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck)}


# Always the same examples: what is found by chance should be found by the slow test.
@settings(max_examples=120, derandomize=True, **SETTINGS)
@given(choice=st.sampled_from(ALL), data=st.data())
def test_any_damage_is_one_error_or_an_answer(
    files: Files, tmp_path_factory: pytest.TempPathFactory, choice: Any, data: st.DataObject
) -> None:
    run(files, tmp_path_factory.getbasetemp() / "damaged", choice, data)


@pytest.mark.slow
@settings(max_examples=1500, **SETTINGS)
@given(choice=st.sampled_from(ALL), data=st.data())
def test_fifteen_hundred_damages(
    files: Files, tmp_path_factory: pytest.TempPathFactory, choice: Any, data: st.DataObject
) -> None:
    run(files, tmp_path_factory.getbasetemp() / "damaged1500", choice, data)
