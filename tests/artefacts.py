"""Zoo models taken to a plan, to weights and to a file, with as little work as a test needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.external_data_helper
from numpy.typing import NDArray
from torch import Tensor

from quantkit.models.model_source import Source
from quantkit.models.trace import Traced
from quantkit.prepare import Planned
from quantkit.recipes.loader import describe_recipe, load_recipe

Batches = list[dict[str, Tensor]]

# A model as `file.py:function`: two blocks of siblings q and k behind a norm, and an output layer.
MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k = nn.Linear(64, 32), nn.Linear(64, 32, bias=False)
        self.out = nn.Linear(32, 64)

    def forward(self, x):
        y = self.norm(x)
        return x + self.out(torch.tanh(self.q(y)) * self.k(y))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for _ in range(LOOPS):
            for block in self.blocks:
                x = block(x)
        return x

def make():
    torch.manual_seed(SEED)
    net = Net()
    CHANGE
    return net, {"x": torch.randn(2, 8, 64)}, {"x": {0: "batch", 1: "sequence"}}
"""


def write_net(folder: Path, seed: int = 0, change: str = "pass", loops: int = 1) -> str:
    """MODEL with a seed and a line of code that changes `net`; returns the MODEL argument.

    loops: how often the blocks run, one after the other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "net.py"
    values = {"SEED": str(seed), "CHANGE": change, "LOOPS": str(loops)}
    code = MODEL
    for name, value in values.items():
        code = code.replace(name, value)
    file.write_text(code)
    return f"{file}:make"


def plan_traced(traced: Traced, recipe: str) -> Planned:
    """What `plan_model` returns, of a model that was traced before."""
    chosen = load_recipe(recipe)
    plan = chosen.plan(traced.layers)
    return Planned(traced, plan, describe_recipe(chosen, f"recipe {recipe}", plan))


def random_batches(source: Source, count: int = 3, **sizes: int) -> Batches:
    """Example inputs with several seeds; where there is an attention mask, two are left out."""
    batches = []
    for seed in range(count):
        inputs = source.example(sizes or None, seed=seed).kwargs
        if "attention_mask" in inputs:
            inputs["attention_mask"][0, -2:] = 0
        batches.append(inputs)
    return batches


def write_npz(path: Path, batches: Batches) -> Path:
    """Batches of one size as an archive, samples along the first axis."""
    np.savez(
        path, **{name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    )
    return path


@dataclass(frozen=True)
class File:
    """A written model.onnx that a test may damage; its weights lie in model.onnx.data."""

    path: Path

    def copy_to(self, folder: Path) -> File:
        shutil.copytree(self.path.parent, folder, dirs_exist_ok=True)
        return File(folder / self.path.name)

    def edit(self, name: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        """Change the values of a float32 initializer, wherever it is stored."""
        self._edit_bytes(
            name, lambda data: change(np.frombuffer(data, np.float32)).astype(np.float32).tobytes()
        )

    def flip_bit(self, name: str, byte: int = 0, bit: int = 0) -> None:
        """Flip one stored bit of an initializer."""

        def change(data: bytes) -> bytes:
            return data[:byte] + bytes([data[byte] ^ (1 << bit)]) + data[byte + 1 :]

        self._edit_bytes(name, change)

    def _edit_bytes(self, name: str, change: Callable[[bytes], bytes]) -> None:
        model = onnx.load(self.path, load_external_data=False)
        tensor = next(t for t in model.graph.initializer if t.name == name)
        if not onnx.external_data_helper.uses_external_data(tensor):
            data = onnx.numpy_helper.to_array(tensor).tobytes()
            tensor.ClearField("float_data")
            tensor.raw_data = change(data)
            onnx.save(model, self.path)
            return
        where: Mapping[str, str] = {entry.key: entry.value for entry in tensor.external_data}
        with (self.path.parent / where["location"]).open("r+b") as file:
            file.seek(int(where.get("offset", 0)))
            data = file.read(int(where["length"]))
            file.seek(int(where.get("offset", 0)))
            file.write(change(data))

    def initializers(self) -> list[str]:
        model = onnx.load(self.path, load_external_data=False)
        return [tensor.name for tensor in model.graph.initializer]
