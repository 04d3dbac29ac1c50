"""How fast are the kernels? Elements per CPU-second of one thread, beside a copy in memory.

    python benchmarks/kernels.py -o benchmarks/results/kernels.json

For every format and input dtype: one chunk of rows, as the streaming writer hands it over, is
quantized into buffers that exist already, scales and packing included; then decoded. Every figure
is the best of many runs in this process; `of_memcpy` relates it to copying the input's bytes in the
same run. `start_up` is what a process pays before the first element: CPU seconds of importing the
kernels and running the first loop, on top of Python and numpy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import ml_dtypes
import numpy as np

from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS

SHAPE = (256, 4096)
DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))

NUMPY = "import ml_dtypes, numpy as np; x = np.ones((1, 32), ml_dtypes.bfloat16)"
FIRST_LOOP = f"{NUMPY}; from quantkit.numerics import kernels; kernels.amax(x)"


def least_seconds(work: Callable[[], Any], runs: int) -> float:
    """CPU seconds of the quickest of `runs` calls, after one that nobody counts."""
    work()
    seconds = []
    for _ in range(runs):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def process_seconds(code: str, runs: int) -> float:
    """CPU seconds, user and system, of a Python process that runs `code`; the least of `runs`."""
    seconds = []
    for _ in range(runs + 1):  # the first fills caches
        process = subprocess.Popen([sys.executable, "-c", code])
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"failed: {code}")
        seconds.append(usage.ru_utime + usage.ru_stime)
    return min(seconds[1:])


def measure(runs: int) -> dict[str, Any]:
    values = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    results: dict[str, Any] = {"memcpy": {}, "amax": {}, "quantize": {}, "dequantize": {}}
    for dtype in DTYPES:
        x = values.astype(dtype)
        copy = np.empty_like(x)
        memcpy = least_seconds(lambda x=x, copy=copy: np.copyto(copy, x), runs)

        def speed(seconds: float, memcpy: float = memcpy) -> dict[str, float]:
            return {
                "elements_per_cpu_second": round(values.size / seconds / 1e6) * 1_000_000,
                "of_memcpy": round(memcpy / seconds, 4),
            }

        results["memcpy"][dtype.name] = speed(memcpy)
        results["amax"][dtype.name] = speed(least_seconds(lambda x=x: kernels.amax(x), runs))
        largest = kernels.amax(x)
        for name, fmt in FORMATS.items():
            q = kernels.quantize_rows(x, fmt, largest)
            out = q.data, q.scale
            seconds = least_seconds(
                lambda args=(x, fmt, largest, out): kernels.quantize_rows(*args), runs
            )
            results["quantize"].setdefault(name, {})[dtype.name] = speed(seconds)
            if dtype == np.float32:  # what it decodes to
                seconds = least_seconds(lambda q=q: kernels.dequantize(q), runs)
                results["dequantize"][name] = {dtype.name: speed(seconds)}
    return results


def describe_machine() -> dict[str, Any]:
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": names[0] if names else platform.processor(),
        "llvm": llvmlite.binding.get_host_cpu_name(),
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "llvmlite": llvmlite.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=100)
    args = parser.parse_args()
    results = {
        "command": "python benchmarks/kernels.py -o benchmarks/results/kernels.json",
        "shape": SHAPE,
        "runs": args.runs,
        "start_up_cpu_seconds": {
            "python_and_numpy": round(process_seconds(NUMPY, 5), 3),
            "with_the_first_loop": round(process_seconds(FIRST_LOOP, 5), 3),
        },
        **measure(args.runs),
        "machine": describe_machine(),
    }
    for step in ("memcpy", "amax", "quantize", "dequantize"):
        print(f"\n{step}: M elements per CPU-second (share of memcpy)")
        rows = results[step] if step.endswith("quantize") else {"": results[step]}
        for name, row in rows.items():
            cells = (
                f"{dtype} {cell['elements_per_cpu_second'] / 1e6:6.0f} ({cell['of_memcpy']:.2f})"
                for dtype, cell in row.items()
            )
            print(f"  {name:12}", "   ".join(cells))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
