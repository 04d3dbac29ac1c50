"""How much memory does an export need? A 2-billion-parameter model, on whatever machine this is.

    python benchmarks/export_scale.py -o benchmarks/results/export_scale.json

Writes a Llama checkpoint with random bfloat16 weights (4.1 GB, sharded) to a temporary folder,
exports it to NVFP4 ONNX with calibration in a process of its own, and records that process's peak
resident memory, time and output size. The folder is deleted afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
TOKENS = 32


def write_checkpoint(folder: Path) -> int:
    """Write the model shard by shard; returns the number of parameters."""
    import torch
    from accelerate import init_empty_weights
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(CONFIG))
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    torch.manual_seed(0)
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in model.named_parameters():
        shard = name.split(".")[2] if ".layers." in name else "outer"
        shards.setdefault(shard, {})[name] = parameter.shape
    weight_map = {}
    count = 0
    for index, shapes in enumerate(shards.values(), 1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name, shape in shapes.items():
            count += shape.numel()
            tensors[name] = (
                torch.ones(shape, dtype=torch.bfloat16)
                if len(shape) == 1
                else torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
            )
            weight_map[name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return count


def write_calibration(file: Path) -> None:
    """Two short sequences of token ids: enough to set every input scale."""
    import numpy as np

    ids = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (2, TOKENS))
    np.savez(file, input_ids=ids, attention_mask=np.ones_like(ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="where the temporary files go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        work = Path(temporary)
        model = work / "model"
        model.mkdir()
        parameters = write_checkpoint(model)
        write_calibration(work / "calibration.npz")
        command = [
            *("quantkit", "export", "--fp4", str(model), "-o", str(work / "out")),
            *("--calibration", str(work / "calibration.npz")),
        ]
        # ru_maxrss of the children is the largest of them: this must be the only big one.
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "quantkit.cli.main", *command[1:]], check=True, env=os.environ
        )
        seconds = time.perf_counter() - start
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = {
            "command": "python benchmarks/export_scale.py -o benchmarks/results/export_scale.json",
            "parameters": parameters,
            "source_bytes": sum(f.stat().st_size for f in model.glob("*.safetensors")),
            "output_bytes": sum(f.stat().st_size for f in (work / "out").iterdir()),
            "peak_rss_bytes": usage.ru_maxrss * 1024,
            "wall_seconds": round(seconds, 1),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
            "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
        }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
