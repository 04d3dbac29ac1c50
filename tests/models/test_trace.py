"""The traced graph, given its weights back, is the model: at every shape, for the whole zoo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from quantkit.errors import QuantkitError
from quantkit.models.examples import Example
from quantkit.models.source import Source, open_model
from quantkit.models.trace import Traced, trace
from tests.zoo import ZOO

SIZES = {
    "batch": 3,
    "sequence": 9,
    "past_sequence": 4,
    "image_tokens": 10,
    "text_tokens": 5,
    "height": 24,
    "width": 16,
}


def with_weights(traced: Traced, module: nn.Module) -> Callable[..., dict[str, Tensor]]:
    """The program as a function, computing with the parameters and buffers of `module`."""
    program = traced.program
    state = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    fake = dict(program.state_dict)
    program.state_dict.update({name: state[name] for name in fake})
    graph = program.module()
    program.state_dict.update(fake)
    return lambda inputs: graph(**{name.replace(".", "_"): x for name, x in inputs.items()})


def reference(source: Source) -> nn.Module:
    """The same model, loaded by its own library."""
    import diffusers
    import transformers

    library: Any = transformers if source.kind == "transformers" else diffusers
    return getattr(library, source.model_class).from_pretrained(source.folder).eval()


def example_with_padding(source: Source, sizes: dict[str, int], seed: int) -> Example:
    known = source.example().sizes
    example = source.example({k: v for k, v in sizes.items() if k in known}, seed=seed)
    if "attention_mask" in example.kwargs:
        example.kwargs["attention_mask"][0, -2:] = 0
    return example


@pytest.mark.parametrize("name", ZOO)
def test_program_equals_the_library_at_two_shapes(
    name: str, opened: Callable[[str], Source], traced: Callable[[str], Traced]
) -> None:
    """No axis is baked in (C23), no weight is mixed up, inputs and outputs have their names."""
    source, model = opened(name), reference(opened(name))
    graph = with_weights(traced(name), model)
    for sizes, seed in (({}, 0), (SIZES, 1)):
        example = example_with_padding(source, sizes, seed)
        with torch.no_grad():
            wanted, got = source.call(model, example.kwargs), graph(example.kwargs)
        assert tuple(wanted) == tuple(got) == traced(name).example.output_names
        for key, value in wanted.items():
            assert got[key].shape == value.shape
            torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-6)
            assert value.abs().max() > 0


@pytest.mark.parametrize("name", ZOO)
def test_program_names_weights_as_the_checkpoint_and_stores_none(
    name: str, traced: Callable[[str], Traced]
) -> None:
    program, source = traced(name).program, traced(name).source
    assert set(program.state_dict) == set(source.state)
    for key, value in program.state_dict.items():
        assert isinstance(value, FakeTensor)
        assert tuple(value.shape) == source.state[key].shape
    for value in traced(name).buffers.values():
        assert not isinstance(value, FakeTensor)
        assert value.device.type == "cpu"


def test_cache_comes_out_as_it_went_in(traced: Callable[[str], Traced]) -> None:
    example = traced("qwen3_cache").example
    parts = [f"{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    assert list(example.kwargs)[2:] == [f"past_key_values.{part}" for part in parts]
    assert example.output_names == ("logits", *(f"present.{part}" for part in parts))


def test_weights_follow_the_compute_dtype(opened: Callable[[str], Source]) -> None:
    half = trace(opened("vit"), torch.bfloat16)
    assert {value.dtype for value in half.program.state_dict.values()} == {torch.bfloat16}
    assert half.example.kwargs["pixel_values"].dtype == torch.bfloat16
    assert {layer.dtype for layer in half.layers} == {"F32"}


def test_modules_kept_in_float32_stay_so_in_the_graph(opened: Callable[[str], Source]) -> None:
    """T5's `wo` overflows float16; transformers keeps it, and so does the trace."""
    state = trace(opened("t5_encoder"), torch.float16).program.state_dict
    kept = {name for name, value in state.items() if value.dtype == torch.float32}
    assert kept == {f"encoder.block.{i}.layer.1.DenseReluDense.wo.weight" for i in range(2)}


FUNCTIONS = """
import torch
from torch import nn

class Baked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        return self.fc(x.reshape(int(x.shape[0]), -1)[:, :4])

class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    def forward(self, x):
        return self.layer(x)

def baked():
    return Baked(), {"x": torch.randn(2, 3, 4)}, {"x": {0: "batch"}}

def branch():
    return Branch(), {"x": torch.randn(2, 3)}

def clash():
    return nn.Linear(4, 4), {"input": torch.randn(2, 5)}

def encoder():
    return Encoder(), {"x": torch.randn(2, 5, 32)}, {"x": {0: "batch", 1: "sequence"}}
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    file = tmp_path / "models.py"
    file.write_text(FUNCTIONS)
    return file


def test_axis_baked_in_by_the_code_is_an_error_that_names_it(functions: Path) -> None:
    """C23: traced at batch 2, the legacy exporter returned two rows for a batch of three."""
    with pytest.raises(QuantkitError, match=r"Baked fixes axis 0 \('batch'\) of input 'x' to 2"):
        trace(open_model(f"{functions}:baked"))


def test_axis_that_does_not_fit_a_constant_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "fixed.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "class Fixed(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x + torch.ones(7)\n"
        "def f():\n"
        "    return Fixed(), {'x': torch.randn(2, 7)}, {'x': {0: 'batch', 1: 'sequence'}}\n"
    )
    with pytest.raises(QuantkitError, match=r"axis 1 \('sequence'\) of input 'x' to 7"):
        trace(open_model(f"{file}:f"))


@pytest.mark.parametrize("name", ["branch", "clash"])
def test_model_that_cannot_be_traced_is_one_error(functions: Path, name: str) -> None:
    with pytest.raises(QuantkitError, match="cannot be traced"):
        trace(open_model(f"{functions}:{name}"))


def test_multihead_attention_is_traced_without_its_fused_path(functions: Path) -> None:
    source = open_model(f"{functions}:encoder")
    traced = trace(source)
    assert torch.backends.mha.get_fastpath_enabled()
    targets = {str(node.target) for node in traced.program.graph.nodes}
    assert not any("_transformer_encoder_layer_fwd" in target for target in targets)
    example = source.example({"batch": 3, "sequence": 7})
    got = with_weights(traced, source.load())(example.kwargs)["output"]
    with torch.no_grad():
        wanted = source.call(source.load(), example.kwargs)["output"]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_tracing_leaves_the_forward_of_the_module_alone(functions: Path) -> None:
    assert "forward" not in vars(trace(open_model(f"{functions}:encoder")).module)
