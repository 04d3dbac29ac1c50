"""What a trace of every zoo model says, kept as JSON so that the default run need not trace.

`python -m tests.models.headers.golden` writes it again; a slow test holds it against the trace.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantkit.models.checkpoint import Checkpoint, TensorInfo
from quantkit.models.key_map import map_keys
from quantkit.models.trace import Traced
from quantkit.recipes.layer import Layer

FILE = Path(__file__).with_name("zoo.json")
DEFAULTS = asdict(Layer("", "", "Linear", "linear", ()))


def observe(traced: Traced) -> dict[str, Any]:
    """One entry of the file: headers, configuration and traced facts, in the checkpoint's names."""
    folder = traced.source.folder
    assert folder is not None
    checkpoint = Checkpoint(folder)
    keys = {name: name for name in checkpoint.infos}
    if traced.source.kind == "transformers":
        keys = map_keys(traced.module, checkpoint) or {}
    config = json.loads((folder / "config.json").read_text())
    return {
        "class": traced.source.model_class,
        "config": {k: v for k, v in config.items() if "version" not in k},
        "tensors": {name: list(info.shape) for name, info in sorted(checkpoint.infos.items())},
        "layers": [_spell(layer, keys) for layer in traced.layers],
    }


def _spell(layer: Layer, keys: Mapping[str, str]) -> dict[str, Any]:
    """A layer without what is as usual; its weight is the tensor that the checkpoint holds."""
    spelled = asdict(layer) | {"weight": keys[layer.weight]}
    if spelled["weight"] == f"{layer.name}.weight":
        del spelled["weight"]
    return {k: v for k, v in spelled.items() if k not in DEFAULTS or v != DEFAULTS[k]}


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def layers_of(entry: Mapping[str, Any]) -> list[Layer]:
    """The traced layers of an entry."""
    found = []
    for spelled in entry["layers"]:
        facts = DEFAULTS | {"weight": f"{spelled['name']}.weight"} | spelled
        facts |= {"shape": tuple(facts["shape"]), "tied": tuple(facts["tied"])}
        found.append(Layer(**facts))
    return found


def infos_of(tensors: Mapping[str, list[int]], dtype: str = "F32") -> dict[str, TensorInfo]:
    """Headers of tensors that nobody stored."""
    return {k: TensorInfo(k, tuple(s), dtype, Path("none"), 0, 0) for k, s in tensors.items()}


def write() -> None:
    """Trace the zoo and write the file."""
    import tempfile

    import torch

    from quantkit.models.source import open_model
    from quantkit.models.trace import trace
    from tests.zoo import ZOO

    entries = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in ZOO.items():
            traced = trace(open_model(make(Path(folder) / name)), torch.float32)
            entries[name] = observe(traced)
    lines = ",\n".join(
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in entry.items())
        + "\n}"
        for name, entry in entries.items()
    )
    FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    write()
