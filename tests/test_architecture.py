"""The architecture, executable: who may import whom, how long a file may grow, what stays light.

A rule that only a document states is broken within a month; see docs in README, "How it is built".
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "quantkit"

# A part may import what stands to its left, never what stands to its right.
ORDER = [
    "errors",
    "progress",
    "parallel",
    "manifest",
    "resume",
    "numerics",
    "recipes",
    "models",
    "metrics",
    "calibrate",
    "algorithms",
    "weights",
    "streamed",
    "simulate",
    "prepare",
    "finetune",
    "interop",
    "export",
    "engines",
    "evaluate",
    "search",
    "report",
    "cli",
]
MAX_LINES = 400
MAX_HELP_SECONDS = 0.3
TORCH_FREE = (
    "manifest.py",
    "resume.py",
    "progress.py",
    "parallel.py",
    "streamed.py",
    "weights.py",
    "models/checkpoint.py",
    "models/headers",
    "models/locate.py",
    "models/quantized",
    "models/writer.py",
    "export/checkpoint",
    "evaluate/beside.py",
    "evaluate/checkpoint.py",
    "evaluate/chunks.py",
    "evaluate/differences.py",
    "evaluate/pairs.py",
    "evaluate/verify.py",
    "metrics.py",
    "numerics/formats.py",
    "numerics/qtensor.py",
    "numerics/kernels.py",
    "numerics/machine_code.py",
    "numerics/steps.py",
    "recipes",
    "report",
)

FILES = sorted(PACKAGE.rglob("*.py"))


def imports_of(file: Path) -> list[str]:
    """Every module a file imports anywhere, absolute names."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            module = node.module or ""
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return found


def part_of(module: str) -> str | None:
    pieces = module.split(".")
    if pieces[0] != "quantkit" or len(pieces) < 2:
        return None
    return pieces[1] if pieces[1] in ORDER else None


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_go_left(file: Path) -> None:
    relative = file.relative_to(PACKAGE)
    own = relative.parts[0].removesuffix(".py")
    if own == "__init__":
        return
    assert own in ORDER, f"{relative} is in no part of the design"
    for module in imports_of(file):
        part = part_of(module)
        if part is not None:
            assert ORDER.index(part) <= ORDER.index(own), f"{relative} imports {module}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_files_stay_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", TORCH_FREE)
def test_light_parts_do_not_import_torch(path: str) -> None:
    target = PACKAGE / path
    modules = [target] if target.is_file() else sorted(target.rglob("*.py"))
    assert modules, f"{path} is gone; mend this list"
    names = [
        ".".join(m.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for m in modules
    ]
    code = f"import sys, importlib; [importlib.import_module(n) for n in {names}]"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_exporters_only_repack() -> None:
    """What is measured is what ships: an exporter that can quantize will one day do it again."""
    for file in sorted((PACKAGE / "export").rglob("*.py")):
        for module in imports_of(file):
            assert part_of(module) != "algorithms", f"{file} imports {module}"
            assert module != "quantkit.numerics.kernels.quantize", f"{file} quantizes"
            assert module != "quantkit.numerics.codec.quantize", f"{file} quantizes"


def test_help_is_quick() -> None:
    """The least of five runs: the machine may be busy, the import graph is what is measured."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "quantkit.cli.main", "--help"], check=True, capture_output=True
        )
        seconds.append(time.perf_counter() - start)
        if seconds[-1] < MAX_HELP_SECONDS:
            return
    pytest.fail(f"quantkit --help takes {min(seconds):.2f} s; something heavy is imported")
