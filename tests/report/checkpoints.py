"""Documents of checkpoint folders by hand, as export and verify write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.manifest import model_key, write_json
from tests.report.conftest import manifest as graph_manifest
from tests.report.conftest import plan_row

LAYERS = [f"model.layers.{n}.mlp.{name}_proj" for n in range(3) for name in ("gate", "down")]


def manifest(layout: str = "float", **export: Any) -> dict[str, Any]:
    """Six layers quantized, a norm and a head kept, one LoRA merged into two layers."""
    kept = [
        plan_row("model.norm", None, op="norm", shape=[64], reason="norm: tiny", bytes_after=128),
        plan_row("lm_head", None, reason="outside the repeated body", bytes_after=12288),
    ]
    loras = [
        {
            "lora": "style",
            "layer": layer,
            "elements": 4096,
            "error_delta": -0.02,
            "delta": 1.0,
            "error": 0.04,
            "merged": 100.0,
            "share": 0.98,
            "ratio": 5.0,
            "size": 0.1,
        }
        for layer in LAYERS[:2]
    ]
    return graph_manifest() | {
        "command": ["quantkit", "export", "--fp4", "--to", "modelopt", "models/llama", "-o", "o"],
        "model": {
            "spec": "models/llama",
            "kind": "checkpoint",
            "model_class": "LlamaForCausalLM",
            "task": None,
            "dtype": "BF16",
            "parameters": 123456,
            "content_key": "ab" * 32,
            "loras": [{"path": "style", "scale": 0.8, "content_key": "cd" * 32}],
        },
        "compute_dtype": None,
        "calibration": {"source": "stats.json", "samples": 0, "batches": 0},
        "plan": kept + [plan_row(name, "nvfp4") for name in LAYERS],
        "coverage": {
            "quantized_parameters": 100000,
            "parameters": 123456,
            "quantized_bytes_share": 0.81,
            "bytes_before": 2_000_000,
            "bytes_after": 600_000,
        },
        "warnings": ["a line of the export"],
        "export": {
            "target": "modelopt",
            "layout": layout,
            "files": [{"name": "model.safetensors", "bytes": 600_500}],
            "described": [],
            "left_out": {"pytorch_model.bin": "a pickle, which can run code when it is opened"},
            "loras": loras,
            "input_amax": {},
            "given": {"model": "models/llama"},
            "layers": [],
            "inputs": [],
            "outputs": [],
        }
        | export,
    }


def verify(**fields: Any) -> dict[str, Any]:
    rows = [
        {"layer": name, "format": "nvfp4", "elements": 4096, "relative_l2": 0.12 - 0.01 * n}
        for n, name in enumerate(LAYERS)
    ]
    return {
        "passed": True,
        "kind": "checkpoint",
        "target": "modelopt",
        "layout": "modelopt",
        "source": {"spec": "models/llama", "layout": "float", "loras": ["style"]},
        "weights": {"checked": 6, "identical": 6, "different": []},
        "kept": {"checked": 2, "identical": 2, "different": []},
        "tensors": 26,
        "bytes": 600_000,
        "differences": [],
        "problems": [],
        "weight_error": {"relative_l2": 0.095, "rows": rows},
        "warnings": [],
        **fields,
    }


FAILED = {
    "passed": False,
    "weights": {"checked": 6, "identical": 5, "different": [LAYERS[0]]},
    "differences": [
        {"kind": "layer", "name": LAYERS[0], "what": "codes", "detail": "1 of 4,096 differ"},
        {"kind": "tensor", "name": "model.norm.weight", "what": "missing", "detail": "nowhere"},
    ],
}


def write(folder: Path, made: dict[str, Any], verified: dict[str, Any] | None) -> Path:
    """A folder with the documents, and a file for the content key."""
    folder.mkdir()
    write_json(folder / "quantkit.json", made)
    (folder / "model.safetensors").write_bytes(b"weights")
    if verified is not None:
        write_json(folder / "verify.json", {"content_key": model_key(folder), **verified})
    return folder
