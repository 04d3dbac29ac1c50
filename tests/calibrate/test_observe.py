"""Calibration sees what the layers saw, says what is wrong, and leaves no trace in the model."""

from __future__ import annotations

import resource

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quantkit.calibrate.observe import Calibration, calibrate
from quantkit.errors import QuantkitError
from tests.calibrate.models import Block, Router, Stack, linears, seeded, token_batches


def run(module: nn.Module, *batches: dict[str, Tensor], **options: bool) -> Calibration:
    return calibrate(module, list(batches), linears(module, q="qkv", k="qkv", v="qkv"), **options)


def test_input_amax_is_the_largest_magnitude_any_batch_brought() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    batches = [{"input": torch.randn(5, 8, generator=torch.Generator().manual_seed(i))}
               for i in range(3)]  # fmt: skip
    result = run(module, *batches)
    x = torch.cat([batch["input"] for batch in batches])
    hidden = module[1](module[0](x)).detach()
    assert result.stats["0"].input_amax == float(x.abs().max())
    assert result.stats["2"].input_amax == pytest.approx(float(hidden.abs().max()), rel=1e-6)
    assert result.stats["0"].batches == result.batches == 3
    assert result.uncalibrated == ()
    assert result.warnings == ()


def test_second_moment_is_the_mean_square_per_channel_in_float64() -> None:
    module = nn.Sequential(nn.Linear(6, 6)).eval()
    x = torch.randn(2, 1500, 6) * torch.arange(1, 7)
    result = run(module, {"input": x[:1]}, {"input": x[1:]}, second_moment=True)
    moment = result.stats["0"].input_second_moment
    assert moment is not None
    assert moment.dtype == np.float64
    np.testing.assert_allclose(moment, (x.double() ** 2).mean((0, 1)).numpy(), rtol=1e-12)
    assert run(module, {"input": x}).stats["0"].input_second_moment is None


def test_padding_may_hold_nan_when_a_mask_says_so() -> None:
    """Case C15, masked rows."""
    module = seeded(Block)
    x = torch.randn(2, 5, 32)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    loud = x.clone()
    loud[1, 3:] = 1e6
    quiet = x.clone()
    quiet[1, 3:] = 0
    module.norm = nn.Identity()  # so that what is in the padding reaches the layers as it is
    expected = run(module, {"x": quiet, "attention_mask": mask})
    assert run(module, {"x": loud, "attention_mask": mask}).stats == expected.stats
    only = nn.Sequential(nn.Linear(32, 4)).eval()
    poisoned = x.clone()
    poisoned[1, 3:] = torch.nan
    result = calibrate(
        only,
        [{"input": poisoned, "attention_mask": mask}],
        linears(only),
        call=lambda module, batch: module(batch["input"]),
    )
    assert result.stats["0"].input_amax == float(x[mask.bool()].abs().max())


@pytest.mark.parametrize(("value", "word"), [(torch.nan, "NaN"), (torch.inf, "Inf")])
def test_a_non_finite_activation_names_layer_batch_and_share(value: float, word: str) -> None:
    """Case C15, real rows: amax never becomes NaN or Inf."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    broken = torch.ones(4, 8)
    broken[2, :2] = value
    with pytest.raises(QuantkitError, match=rf"0: 6\.25% .* {word} in calibration batch 1 \(2 of"):
        run(module, {"input": torch.ones(4, 8)}, {"input": broken})


def test_experts_that_no_token_reached_get_the_largest_range_of_their_type() -> None:
    """Case C16: listed, filled by the stated rule, the same on every run."""
    module = seeded(Router)
    batch = {"x": torch.randn(64, 32, generator=torch.Generator().manual_seed(3))}
    result = run(module, batch)
    assert result.uncalibrated == ("experts.2", "experts.3")
    assert result.stats["experts.2"].batches == 0
    reached = [result.stats[name].input_amax for name in ("inner", "experts.0", "experts.1")]
    assert result.stats["experts.2"].input_amax == max(a for a in reached if a is not None)
    (warning,) = result.warnings
    assert warning.startswith("uncalibrated: 2 layers were never reached (experts.2, experts.3)")
    assert run(module, batch).stats == result.stats


def test_an_unreached_layer_takes_the_range_of_its_own_group_first() -> None:
    """Case C16."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loud, self.q, self.k = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            y: Tensor = self.loud(x * 100) * 0
            return y + (self.k(x) if bool(t > 0.5) else self.q(x))

    result = run(Half().eval(), {"x": torch.ones(1, 4), "t": torch.tensor(0.0)})
    assert result.uncalibrated == ("k",)
    assert result.stats["loud"].input_amax == 100
    assert result.stats["k"].input_amax == 1


def test_siblings_report_the_range_of_their_common_input() -> None:
    result = run(seeded(Block), {"x": torch.randn(1, 4, 32)})
    assert result.stats["q"] == result.stats["k"] == result.stats["v"]


def test_memory_does_not_grow_with_the_number_of_batches() -> None:
    """Case C17: running maxima, no stored activations."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()

    def peak_after(count: int) -> int:
        batches = ({"input": torch.full((4096, 64), float(i))} for i in range(count))  # 1 MiB each
        calibrate(module, batches, linears(module))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = peak_after(5)
    assert peak_after(100) - before < 32 * 1024  # KiB; keeping inputs would take 200 MiB


def test_a_model_left_in_training_mode_is_calibrated_in_evaluation_and_left_as_it_was() -> None:
    """Case C18."""
    module = seeded(Stack)
    module.train()
    module.blocks[0].eval()
    flags = [part.training for part in module.modules()]
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    first, second = (run(module, *token_batches(4)) for _ in range(2))
    assert first.stats == second.stats
    assert [part.training for part in module.modules()] == flags
    for name, value in module.named_buffers():
        assert torch.equal(value, buffers[name]), name
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_hooks_and_flags_are_undone_when_a_batch_fails() -> None:
    """Case C18."""
    module = nn.Sequential(nn.Linear(8, 8)).train()
    with pytest.raises(QuantkitError):
        run(module, {"input": torch.full((1, 8), torch.nan)})
    assert module.training
    assert not module[0]._forward_pre_hooks
    assert not module[0]._forward_hooks


def test_no_autograd_graph_is_built() -> None:
    """Case C18."""
    module = nn.Sequential(nn.Linear(8, 8)).eval()
    tracked: list[bool] = []
    module[0].register_forward_hook(lambda _m, _a, y: tracked.append(y.requires_grad))
    run(module, {"input": torch.ones(1, 8)})
    assert tracked == [False]


def test_activations_beyond_float16_are_pointed_out() -> None:
    """Case C25: T5's feed-forward activations reach 66 246."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    for layer in module:
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    result = run(module, {"input": torch.tensor([[66_246.0, 0, 0, 0]])})
    assert "0: its input reaches 66246, float16 ends at 65504" in result.warnings[0]
    assert "1: its output reaches 66246" in result.warnings[-1]
    assert run(module, {"input": torch.tensor([[65_504.0, 0, 0, 0]])}).warnings == ()


def test_progress_counts_batches() -> None:
    module = nn.Sequential(nn.Linear(8, 8)).eval()
    batches = [{"input": torch.ones(1, 8)}] * 3
    for given, total in ((batches, 3), (iter(batches), 0)):
        steps: list[tuple[int, int]] = []
        calibrate(
            module, given, linears(module), progress=lambda n, m, steps=steps: steps.append((n, m))
        )
        assert steps == [(1, total), (2, total), (3, total)]


def test_no_batch_and_no_reached_layer_are_errors() -> None:
    module = seeded(Router)
    with pytest.raises(QuantkitError, match="holds no batch"):
        run(module)
    unreached = [layer for layer in linears(module) if layer.name in ("experts.2", "experts.3")]
    with pytest.raises(QuantkitError, match="no layer of the plan was reached"):
        calibrate(module, [{"x": torch.ones(2, 32)}], unreached)


def test_a_layer_that_the_module_lacks_is_an_error() -> None:
    layers = linears(nn.ModuleDict({"gone": nn.Linear(4, 4)}))
    with pytest.raises(QuantkitError, match="'gone'"):
        calibrate(nn.Sequential(nn.Linear(4, 4)), [{"input": torch.ones(1, 4)}], layers)


def test_a_layer_that_its_parent_bypasses_is_refused() -> None:
    """MultiheadAttention reads out_proj.weight itself; a hook would silently see nothing."""
    module = nn.MultiheadAttention(8, 2)
    layer = linears(nn.ModuleDict({"out_proj": nn.Linear(8, 8)}))
    with pytest.raises(QuantkitError, match=r"out_proj: torch\.nn\.MultiheadAttention"):
        calibrate(module, [], layer)


def test_the_fused_inference_path_of_torch_does_not_hide_layers() -> None:
    """nn.TransformerEncoderLayer skips its children in evaluation mode unless they have hooks."""
    module = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    result = run(module, {"src": torch.randn(2, 5, 16)})
    assert result.uncalibrated == ()
    assert set(result.stats) == {"linear1", "linear2"}


def test_an_input_that_was_always_zero_is_pointed_out() -> None:
    """Its range would be a guess, and the figures measured on the same data would look fine."""
    module = nn.Sequential(nn.Linear(4, 4))
    seen = run(module, {"input": torch.zeros(2, 4)})
    assert any("was zero in all of the calibration data (0)" in line for line in seen.warnings)
    assert not run(module, {"input": torch.ones(2, 4)}).warnings
