"""Zoo models opened and traced once for all tests of a session, whichever folder asks first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quantkit.models.source import Source, open_model
from quantkit.models.trace import Traced, trace
from tests.zoo import ZOO


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Source]:
    sources: dict[str, Source] = {}

    def get(name: str) -> Source:
        if name not in sources:
            sources[name] = open_model(ZOO[name](tmp_path_factory.mktemp(name)))
        return sources[name]

    return get


@pytest.fixture(scope="session")
def traced(opened: Callable[[str], Source]) -> Callable[[str], Traced]:
    """Traces are shared: a test must not change one."""
    programs: dict[str, Traced] = {}

    def get(name: str) -> Traced:
        if name not in programs:
            programs[name] = trace(opened(name), torch.float32)
        return programs[name]

    return get
