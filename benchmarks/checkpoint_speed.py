"""How much CPU and memory does quantizing a checkpoint take, against `cp` and against other tools?

    python benchmarks/checkpoint_speed.py -o benchmarks/results/checkpoint_speed.json
    python benchmarks/checkpoint_speed.py --peers PYTHON -o ...    # also the other tools
    python benchmarks/checkpoint_speed.py --flux -o ...            # instead 23.8 GB, quantkit alone

Everything is measured in one run on one machine: user plus system time and peak resident memory of
whole processes, from the operating system. The checkpoint is a sharded Llama of 2.2 GB with random
weights, in the page cache, in a temporary folder. Of repeated runs the quickest counts and all are
recorded. What is claimed is quantkit's time less its start-up (`quantkit inspect` on a file of one
tensor); both raw figures are there. PYTHON is an interpreter that has the other tools installed;
one that is missing is recorded as such.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

REPEATS = 5
QUANTKIT = (sys.executable, "-m", "quantkit.cli.main")
RECIPE = ("--recipe", "nvfp4-weight-only", "--to", "compressed-tensors")

PEERS = {
    "torchao": (
        ("torchao", "transformers"),
        """
import sys, torch
from torchao.prototype.mx_formats.inference_workflow import NVFP4WeightOnlyConfig
from transformers import AutoModelForCausalLM, TorchAoConfig
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.bfloat16, quantization_config=TorchAoConfig(NVFP4WeightOnlyConfig())
)
model.save_pretrained(sys.argv[2])
""",
    ),
    "modelopt": (
        ("nvidia-modelopt", "transformers"),
        """
import sys, torch
import modelopt.torch.quantization as mtq
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model = mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, lambda m: m(torch.arange(8)[None]))
export_hf_checkpoint(model, export_dir=sys.argv[2])
""",
    ),
    "llm-compressor": (
        ("llmcompressor", "compressed-tensors"),
        """
import sys
from llmcompressor import model_free_ptq
model_free_ptq(
    model_stub=sys.argv[1], save_directory=sys.argv[2], scheme="NVFP4A16",
    ignore=["lm_head", "re:.*embed_tokens", "re:.*norm.*"], max_workers=1, device="cpu",
)
""",
    ),
}


@dataclass(frozen=True)
class Run:
    """One process: seconds of user and system time, of the clock, and peak resident bytes."""

    user: float
    system: float
    wall: float
    peak_rss: int

    @property
    def cpu(self) -> float:
        return self.user + self.system


def measure(command: Sequence[str | Path]) -> Run:
    """Run a command to its end; SystemExit with its last lines when it fails."""
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen([str(c) for c in command], stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            tail = output.read().decode(errors="replace").strip().splitlines()[-3:]
            raise SystemExit(f"{command[0]} ended with {process.returncode}: {' / '.join(tail)}")
    return Run(usage.ru_utime, usage.ru_stime, wall, usage.ru_maxrss * 1024)


def write_model(name: str, folder: Path) -> int:
    """Write a synthetic checkpoint in a process of its own.

    A child's peak memory counts from what its parent had, so the one that measures stays small.
    """
    command = [sys.executable, str(Path(__file__).with_name("synthetic.py")), name, str(folder)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def fresh(command: Sequence[str | Path], out: Path) -> Run:
    """Measure a command that writes `out`, which is removed before and after."""
    shutil.rmtree(out, ignore_errors=True)
    try:
        return measure(command)
    finally:
        shutil.rmtree(out, ignore_errors=True)


def describe(runs: Sequence[Run]) -> dict[str, object]:
    best = min(runs, key=lambda run: run.cpu)
    return {"cpu": best.cpu, **asdict(best), "all_cpu": [round(run.cpu, 3) for run in runs]}


def compare(model: Path, work: Path) -> dict[str, object]:
    """`cp -r` and quantkit in turns, so that what else the machine does meets both."""
    out, tiny = work / "out", work / "tiny.safetensors"
    header = b'{"weight":{"dtype":"BF16","shape":[4,4],"data_offsets":[0,32]}}'
    tiny.write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))
    export = (*QUANTKIT, "export", *RECIPE, model, "-o", out, "-q")
    fresh(export, out)  # fills the kernel cache
    runs: dict[str, list[Run]] = {"cp": [], "quantkit": [], "start-up": []}
    for _ in range(REPEATS):
        runs["cp"].append(fresh(("cp", "-r", model, out), out))
        runs["quantkit"].append(fresh(export, out))
        runs["start-up"].append(measure((*QUANTKIT, "inspect", tiny)))
    found: dict[str, object] = {name: describe(all_runs) for name, all_runs in runs.items()}
    best = {name: min(run.cpu for run in all_runs) for name, all_runs in runs.items()}
    net = best["quantkit"] - best["start-up"]
    return found | {
        "quantkit_less_start_up_cpu": net,
        "ratio_to_cp": net / best["cp"],
        "raw_ratio_to_cp": best["quantkit"] / best["cp"],
    }


def compare_peers(model: Path, work: Path, python: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, (packages, script) in PEERS.items():
        ask = f"from importlib.metadata import version as v; print([v(p) for p in {packages!r}])"
        asked = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
        if asked.returncode:
            found[name] = {"not_installed": list(packages)}
            continue
        print(name, flush=True)
        try:
            run = fresh((python, "-P", "-c", script, model, work / "peer"), work / "peer")
        except SystemExit as failure:
            found[name] = {"failed": str(failure)}
            continue
        found[name] = {"versions": asked.stdout.strip(), "cpu": run.cpu, **asdict(run)}
    return found


def measure_flux(work: Path) -> dict[str, object]:
    """FLUX.1-dev's transformer: 23.8 GB in, about 7 GB out, both deleted."""
    model, out = work / "flux", work / "flux-out"
    size = write_model("flux", model)
    try:
        target = ("--fp4", "--to", "modelopt", "--data-free")
        run = fresh((*QUANTKIT, "export", *target, model, "-o", out, "-q"), out)
    finally:
        shutil.rmtree(model)
    return {"bytes": size, "command": " ".join(target), "cpu": run.cpu, **asdict(run)}


def describe_machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    packages = ("quantkit", "numpy", "numba", "ml_dtypes")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, help="JSON; added to what is there")
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter that has the other tools")
    parser.add_argument("--flux", action="store_true", help="instead 23.8 GB (needs 35 GB of disk)")
    parser.add_argument("--scratch", type=Path, help="where to put the checkpoints")
    arguments = parser.parse_args()
    result: dict[str, object] = {}
    if arguments.output and arguments.output.is_file():
        result = json.loads(arguments.output.read_text())
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        work = Path(scratch)
        result["machine"] = describe_machine()
        if arguments.flux:
            result["flux"] = measure_flux(work)
        else:
            result["bytes"] = write_model("llama", work / "llama")
            result["command"] = " ".join(RECIPE)
            result |= compare(work / "llama", work)
            if arguments.peers:
                result["peers"] = compare_peers(work / "llama", work, arguments.peers)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
