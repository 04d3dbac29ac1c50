"""Full TensorRT takes the GPU that is present and no other (C27)."""

from __future__ import annotations

import pytest
import torch

from quantkit.engines.tensorrt import RUNTIME
from quantkit.errors import QuantkitError


def test_without_a_gpu_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(QuantkitError, match=r"no GPU is visible here; .* --runtime tensorrt-rtx"):
        RUNTIME.select(None, None, ["sm100"])


def test_the_gpu_present_must_be_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    RUNTIME.select(None, None, ["sm120"])
    with pytest.raises(QuantkitError, match="builds for the GPU present, sm120, not for sm100"):
        RUNTIME.select(None, None, ["sm100"])


def test_blackwell_and_only_blackwell_holds_fp4() -> None:
    able = {name for name, target in RUNTIME.targets.items() if "fp4" in target.holds}
    assert able == {"sm100", "sm103", "sm120", "sm121"}
