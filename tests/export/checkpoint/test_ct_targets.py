"""Targets find exactly the layers they are for, as the library itself matches them (case C11)."""

from __future__ import annotations

import re

import pytest
from compressed_tensors.utils.match import match_name
from hypothesis import given
from hypothesis import strategies as st

from quantkit.export.checkpoint.ct_targets import ignored, name_targets
from quantkit.export.checkpoint.target import Content


def found(targets: list[str], names: list[str]) -> list[str]:
    return [name for name in names if any(match_name(name, target) for target in targets)]


def moe(layers: int, experts: int, prefix: str = "model.") -> list[str]:
    return [
        f"{prefix}layers.{layer}.{part}"
        for layer in range(layers)
        for part in [
            "self_attn.q_proj",
            "mlp.shared_expert.up_proj",
            *(f"mlp.experts.{e}.{p}_proj" for e in range(experts) for p in ("up", "down")),
        ]
    ]


def test_layers_that_are_no_experts_are_named() -> None:
    names = ["model.layers.0.mlp.up_proj", "model.layers.10.mlp.up_proj"]
    assert name_targets(names, [*names, "lm_head"]) == names


def test_all_experts_are_one_pattern_each_kind() -> None:
    everything = moe(3, 12)
    experts = [name for name in everything if ".experts." in name]
    targets = name_targets(experts, everything)
    assert len(targets) == 2
    assert all(target.startswith("re:") and "experts" in target for target in targets)
    assert found(targets, [f"{name}.adapter" for name in experts]) == []
    assert found(targets, everything) == experts


def test_a_layer_whose_experts_differ_splits_the_pattern_by_layer() -> None:
    everything = moe(3, 12)
    chosen = [name for name in everything if ".experts." in name and ".1." not in name[:16]]
    targets = name_targets(chosen, everything)
    assert len(targets) == 4
    assert found(targets, everything) == chosen


def test_one_expert_that_differs_makes_its_fellows_named() -> None:
    everything = moe(1, 4)
    chosen = [n for n in everything if ".experts." in n and not n.endswith(".2.up_proj")]
    targets = name_targets(chosen, everything)
    assert found(targets, everything) == chosen
    assert sum(target.startswith("re:") for target in targets) == 1


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "a.layers.0.layers."])
def test_a_pattern_finds_its_experts_under_another_prefix_too(prefix: str) -> None:
    """vLLM renames modules; a pattern, unlike a name, it cannot rename."""
    everything = moe(2, 2)
    experts = [name for name in everything if ".experts." in name]
    targets = name_targets(experts, everything)
    elsewhere = moe(2, 2, prefix)
    assert found(targets, elsewhere) == [name for name in elsewhere if ".experts." in name]


@given(st.sets(st.integers(0, 2 * (2 + 2 * 3) - 1)))
def test_any_choice_is_found_again_exactly(chosen: set[int]) -> None:
    everything = moe(2, 3)
    names = [name for index, name in enumerate(everything) if index in chosen]
    targets = name_targets(names, everything)
    assert found(targets, everything) == names
    assert all(re.compile(target) for target in targets)


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ([], ["lm_head"]),
        (["lm_head"], ["lm_head"]),
        (["language_model.lm_head"], ["language_model.lm_head"]),
    ],
)
@pytest.mark.parametrize("holder", [None, "text_config"])
def test_a_tied_head_is_added_unless_it_is_there_already(
    kept: list[str], expected: list[str], holder: str | None
) -> None:
    tied = {"tie_word_embeddings": True}
    config = tied if holder is None else {holder: tied}
    assert ignored(Content({}, {}, kept, config)) == expected
    assert ignored(Content({}, {}, kept, {})) == kept
