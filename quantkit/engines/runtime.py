"""What a builder has to know of a runtime: one record each, no code of its own.

TensorRT and TensorRT-RTX share one Python API almost entirely, so there is one builder (build.py)
and this record holds what differs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import QuantkitError


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU architecture as a compile target.

    holds: the narrow element types its engines may contain ("fp8", "fp4", "int4"). emulated:
    layer schemes (see `AskedLayer.scheme`) which build but compute in high precision.
    """

    holds: frozenset[str]
    emulated: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Runtime:
    """A compiler of engines.

    module, extra: what to import, and the quantkit extra that installs it. minimum: oldest major
    version. targets: what it compiles for. elsewhere: targets that it cannot do, with what to do
    instead. select: tells the compiler its targets: (module, builder config, target names).
    """

    name: str
    module: str
    extra: str
    minimum: int
    targets: Mapping[str, Target]
    elsewhere: Mapping[str, str]
    select: Callable[[Any, Any, Sequence[str]], None]

    def load(self) -> Any:
        """The runtime's Python module. Raises QuantkitError when it is missing or too old."""
        try:
            module = importlib.import_module(self.module)
        # A wheel without its shared libraries raises OSError rather than ImportError.
        except (ImportError, OSError) as error:
            raise QuantkitError(
                f"{self.name} cannot be loaded ({error}); "
                f"install it with: pip install 'quantkit[{self.extra}]'"
            ) from None
        if int(module.__version__.split(".")[0]) < self.minimum:
            raise QuantkitError(
                f"{self.name} {module.__version__} is too old: quantkit needs {self.minimum} or "
                f"newer; upgrade with: pip install -U 'quantkit[{self.extra}]'"
            )
        return module
