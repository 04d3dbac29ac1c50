"""quantkit: FP4 and FP8 for PyTorch and ONNX models, calibrated, exported and proven.

The public functions load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.engines.audit import audit
    from quantkit.engines.build import build
    from quantkit.engines.lint import lint
    from quantkit.errors import QuantkitError
    from quantkit.evaluate.verify import verify
    from quantkit.export.run import export_model
    from quantkit.models.source import open_model
    from quantkit.prepare import prepare
    from quantkit.recipes.loader import load_recipe
    from quantkit.report import write_report

__version__ = "0.1.0"

_HOME = {
    "QuantkitError": "quantkit.errors",
    "audit": "quantkit.engines.audit",
    "build": "quantkit.engines.build",
    "export_model": "quantkit.export.run",
    "lint": "quantkit.engines.lint",
    "load_recipe": "quantkit.recipes.loader",
    "open_model": "quantkit.models.source",
    "prepare": "quantkit.prepare",
    "verify": "quantkit.evaluate.verify",
    "write_report": "quantkit.report",
}

__all__ = [
    "QuantkitError",
    "audit",
    "build",
    "export_model",
    "lint",
    "load_recipe",
    "open_model",
    "prepare",
    "verify",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
