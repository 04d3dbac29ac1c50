"""Artefact folders by hand, after the files each stage is documented to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.manifest import write_json

BLOCK = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
LAYERS = [f"encoder.layer.{i}.{name}" for i in range(6) for name in BLOCK]


def plan_row(layer: str, weight: str | None, **fields: Any) -> dict[str, Any]:
    return {
        "layer": layer,
        "type": "Linear",
        "op": "linear",
        "shape": [384, 384],
        "weight_format": weight,
        "input_format": weight,
        "algorithm": weight and "rounding",
        "reason": "matches op: linear",
        "group": layer,
        "bytes_before": 589824,
        "bytes_after": 82948 if weight else 589824,
        **fields,
    }


def manifest() -> dict[str, Any]:
    kept = [
        plan_row(
            "embeddings.word_embeddings",
            None,
            type="Embedding",
            op="embedding",
            shape=[30522, 384],
            reason="embedding: a table lookup, there is no matmul to speed up",
            group=None,
            bytes_before=46881792,
            bytes_after=46881792,
        ),
        plan_row(
            "embeddings.LayerNorm",
            None,
            type="LayerNorm",
            op="norm",
            shape=[384],
            reason="norm: tiny, and its rounding error reaches every later layer",
            group=None,
            bytes_before=1536,
            bytes_after=1536,
        ),
        plan_row("pooler.dense", None, reason="outside the repeated body"),
    ]
    return {
        "schema": 1,
        "tool": {"name": "quantkit", "version": "0.1.0"},
        "created": "2026-11-30T18:25:00+00:00",
        "command": ["quantkit", "export", "--fp4", "models/all-MiniLM-L6-v2", "-o", "minilm-nvfp4"],
        "model": {
            "spec": "models/all-MiniLM-L6-v2",
            "kind": "transformers",
            "model_class": "BertModel",
            "task": None,
            "dtype": "float32",
            "parameters": 22713216,
            "content_key": "9b1f" * 16,
        },
        "recipe": {"name": "nvfp4", "source": "--fp4 picked nvfp4"},
        "compute_dtype": "float32",
        "calibration": {
            "source": "default text (public domain)",
            "batches": 16,
            "samples": 64,
            "description": "64 passages of at most 128 tokens",
            "content_key": "77aa",
            "uncalibrated": [],
        },
        "conventions": {"scale": "multiplies: x = code * block_scale * tensor_scale"},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "onnx": "1.23.2"},
        "plan": kept + [plan_row(name, "nvfp4") for name in LAYERS],
        "coverage": {
            "quantized_parameters": 10616832,
            "parameters": 22713216,
            "quantized_bytes_share": 0.467,
            "bytes_before": 90852864,
            "bytes_after": 53448704,
        },
        "warnings": ["only 47% of the weight bytes are quantized"],
        "export": {
            "target": "onnx",
            "dialect": "tensorrt",
            "opset": 23,
            "files": [
                {"name": "model.onnx", "bytes": 214532},
                {"name": "model.onnx.data", "bytes": 53502976},
            ],
            "layers": [],
            "inputs": [],
            "outputs": [],
        },
    }


def verify() -> dict[str, Any]:
    return {
        "passed": True,
        "runs": [
            {
                "shapes": {"input_ids": [1, 16], "attention_mask": [1, 16]},
                "input_quantizers": True,
                "outputs": [
                    {
                        "name": "last_hidden_state",
                        "relative_l2": 2.1e-7,
                        "max_abs": 1.4e-6,
                        "tolerance": 1e-5,
                        "passed": True,
                    }
                ],
            },
            {
                "shapes": {"input_ids": [4, 77], "attention_mask": [4, 77]},
                "input_quantizers": False,
                "outputs": [
                    {
                        "name": "last_hidden_state",
                        "relative_l2": 3.04e-7,
                        "max_abs": 2.2e-6,
                        "tolerance": 1e-5,
                        "passed": True,
                    }
                ],
            },
        ],
        "weights": {"checked": 36, "identical": 36},
        "layers": {"checked": 36, "worst_relative_l2": 4.4e-7, "worst_layer": LAYERS[3]},
        "cost": {
            "data": {"description": "32 passages", "source": "built in"},
            "outputs": [
                {
                    "name": "last_hidden_state",
                    "relative_l2": 0.31,
                    "cosine": 0.9531,
                    "sqnr_db": 10.2,
                    "norm_ratio": 0.9912,
                }
            ],
            "worst_layers": [
                {"layer": LAYERS[5], "relative_l2": 0.182},
                {"layer": LAYERS[11], "relative_l2": 0.121},
            ],
        },
    }


def build() -> dict[str, Any]:
    return {
        "runtime": "tensorrt-rtx",
        "version": "1.7.1.116",
        "targets": ["sm120"],
        "engine": "model.sm120.engine",
        "bytes": 54100000,
        "seconds": 21.34,
        "sha256": "ab" * 32,
        "key": "cd" * 32,
        "profiles": [],
        "warnings": [],
        "emulated": [],
    }


def audit(mismatched: int = 0, layers: list[str] = LAYERS) -> dict[str, Any]:
    rows = [
        {
            "layer": name,
            "asked": "nvfp4",
            "realised": "bf16 x bf16 -> bf16" if bad else "fp4_e2m1 x fp4_e2m1 -> bf16",
            "operands": ["bf16", "bf16"] if bad else ["fp4_e2m1", "fp4_e2m1"],
            "status": "mismatch" if bad else "ok",
            "fused_with": [],
        }
        for name, bad in ((n, i < mismatched) for i, n in enumerate(layers))
    ]
    return {
        "engine": "model.sm120.engine",
        "runtime_version": "1.7.1",
        "understood": True,
        "summary": {
            "asked": len(rows),
            "realised": len(rows) - mismatched,
            "emulated": 0,
            "mismatched": mismatched,
        },
        "layers": rows,
        "constants": {"fp4_e2m1": 5308416, "fp8_e4m3": 663552},
        "device_memory": 8200000,
    }


def lint() -> dict[str, Any]:
    return {
        "findings": [
            {
                "rule": "dynamic-k",
                "severity": "warning",
                "layer": LAYERS[0],
                "message": "the contraction axis has a symbolic size",
                "fix": "export with a static hidden size",
            }
        ]
    }


@pytest.fixture
def artefact(tmp_path):
    """Writes the given documents into a folder: `artefact(verify=..., audit=None)`."""

    def write(name: str = "minilm-nvfp4", **documents: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        defaults = {
            "quantkit": manifest(),
            "verify": verify(),
            "lint": lint(),
            "build": build(),
            "audit": audit(),
        }
        for stage, content in (defaults | documents).items():
            if content is not None:
                write_json(folder / f"{stage}.json", content)
        return folder

    return write


@pytest.fixture
def made():
    """The builders of the documents, to change before writing."""
    return {
        "quantkit": manifest,
        "verify": verify,
        "build": build,
        "audit": audit,
        "lint": lint,
        "layers": LAYERS,
        "row": plan_row,
    }
