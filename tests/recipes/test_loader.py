from __future__ import annotations

from importlib.resources import files

import pytest

from quantkit.errors import QuantkitError
from quantkit.recipes.loader import builtin_recipes, load_recipe, parse_recipe, pick_recipe

BODY = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_out")
GENERAL = [name for name in builtin_recipes() if not name.startswith("flux-")]


@pytest.mark.parametrize("name", GENERAL)
def test_general_recipes_quantize_the_body_and_nothing_else(name, dit):
    """C10: norms, embeddings, embedders, modulation and the output layer stay, with reasons."""
    plan = load_recipe(name).plan(dit)
    assert list(plan.schemes) == [f"blocks.{i}.{x}" for i in range(2) for x in BODY]
    reasons = {d.layer.name: d.reason for d in plan.kept}
    assert reasons["x_embedder"].startswith("outside the repeated body")
    assert reasons["t_embedder.linear_1"].startswith("outside the repeated body")
    assert reasons["proj_out"].startswith("outside the repeated body")
    assert reasons["blocks.0.norm1"].startswith("norm")
    assert reasons["blocks.0.norm1.linear"].startswith("modulation or time embedding")
    assert reasons["class_table"].startswith("embedding")
    assert reasons["patch"].startswith("convolution")


@pytest.mark.parametrize("name", builtin_recipes())
def test_every_built_in_keeps_both_ends_of_a_tie_and_says_so(name, llm):
    """C14: the head is found by identity of the weight, whatever its name."""
    reasons = {d.layer.name: d.reason for d in load_recipe(name).plan(llm).kept}
    assert reasons["language_model.lm_head"] == (
        "shares its weight with language_model.embed_tokens"
    )
    assert reasons["language_model.embed_tokens"] == (
        "shares its weight with language_model.lm_head"
    )


@pytest.mark.parametrize("name", builtin_recipes())
def test_every_built_in_works_on_a_model_without_repeated_blocks(name, layer):
    model = [
        layer("first", body=None, edge="first"),
        layer("middle", body=None),
        layer("last", body=None, edge="last"),
    ]
    assert list(load_recipe(name).plan(model).schemes) == ["middle"]


@pytest.mark.parametrize("name", builtin_recipes())
def test_every_built_in_keeps_expert_routers(name, layer):
    """Whether the graph sees a plain matmul in them or one that picks experts."""
    block = "model.layers.0.mlp."
    model = [
        layer(block + "gate"),
        layer(block + "router", op="other"),
        layer(block + "shared_expert_gate", 1, 64),
        layer(block + "gate_proj"),
        layer(block + "down_proj"),
    ]
    plan = load_recipe(name).plan(model)
    assert list(plan.schemes) == [block + "gate_proj", block + "down_proj"]
    assert all(decision.reason.startswith("expert router") for decision in plan.kept)


@pytest.mark.parametrize(
    ("name", "weight", "given"),
    [
        ("nvfp4", "nvfp4", "nvfp4"),
        ("nvfp4-weight-only", "nvfp4", None),
        ("fp8", "fp8_channel", "fp8"),
        ("fp8-weight-only", "fp8_channel", None),
        ("fp8-tensor", "fp8", "fp8"),
        ("fp8-dynamic", "fp8_channel", "fp8_channel"),
        ("fp8-block", "fp8_block", "fp8_group"),
        ("mxfp8", "mxfp8", "mxfp8"),
        ("mxfp8-weight-only", "mxfp8", None),
        ("mxfp4", "mxfp4", "mxfp4"),
        ("mxfp4-weight-only", "mxfp4", None),
        ("flux-nvfp4", "nvfp4", "nvfp4"),
        ("flux-fp8", "fp8_channel", "fp8"),
    ],
)
def test_each_name_means_its_formats(name, weight, given, dit):
    scheme = load_recipe(name).plan(dit).schemes["blocks.0.proj_out"]
    assert scheme.weight.name == weight
    assert (scheme.input.name if scheme.input else None) == given
    assert scheme.algorithm == "rounding"


@pytest.mark.parametrize("name", ["flux-nvfp4", "flux-fp8"])
def test_flux_modulation_becomes_fp8_weights_with_untouched_inputs(name, dit):
    scheme = load_recipe(name).plan(dit).schemes["blocks.0.norm1.linear"]
    assert (scheme.weight.name, scheme.input) == ("fp8", None)


def test_the_keep_rules_are_the_same_in_every_built_in():
    """Recipes are flat, so they repeat these rules; only reasons may differ in wording."""
    matches = {
        # What becomes of fused projections is a question for FP8 alone, and no keep rule.
        tuple(str(rule.match) for rule in load_recipe(name).rules if rule.match.fused is None)
        for name in builtin_recipes()
    }
    assert len(matches) == 1
    assert all(rule.optional for name in builtin_recipes() for rule in load_recipe(name).rules[:-1])


def test_every_built_in_is_in_the_guide():
    guide = files("quantkit.recipes").joinpath("README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in guide for name in builtin_recipes())


@pytest.mark.parametrize(
    ("short", "model_class", "picked", "said"),
    [
        ("fp4", "FluxTransformer2DModel", "flux-nvfp4", "declared for FluxTransformer2DModel"),
        ("fp8", "FluxTransformer2DModel", "flux-fp8", "declared for FluxTransformer2DModel"),
        ("fp4", "BertModel", "nvfp4", "--fp4 picked nvfp4"),
        ("fp8", "", "fp8", "--fp8 picked fp8"),
    ],
)
def test_short_names_pick_the_family_recipe_and_say_so(short, model_class, picked, said):
    recipe, why = pick_recipe(short, model_class)
    assert recipe.name == picked
    assert said in why


def test_an_unknown_name_lists_the_nearest_and_all():
    with pytest.raises(QuantkitError, match=r"no recipe 'nvpf4'; did you mean nvfp4.*mxfp8"):
        load_recipe("nvpf4")


def test_a_file_is_read_by_its_suffix_and_errors_carry_its_name(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("rules:\n  - match: {op: linear}\n    quantize: {weight: fp8}\n")
    recipe = load_recipe(path)
    assert (recipe.name, recipe.file) == ("mine", str(path))
    path.write_text("rules:\n  - match: {op: linear}\n    quantise: {weight: fp8}\n")
    with pytest.raises(QuantkitError) as raised:
        load_recipe(str(path))
    assert str(raised.value).startswith(f"{path}: rules[0].quantise: unknown key; did you mean")
    with pytest.raises(QuantkitError, match="does not exist"):
        load_recipe(tmp_path / "absent.yml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(QuantkitError, match="cannot be read"):
        load_recipe(tmp_path / "folder.yaml")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QuantkitError, match="cannot be read"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rules: [", "mine:1: not valid YAML"),
        ("rules:\n - match: {a: 1}\n   keep: x\n   keep: y\n", "mine:4: .*'keep' is written twice"),
        ("- a\n", "mine: a recipe is a mapping"),
        ("", "mine: a recipe is a mapping"),
        ("a: \x00", "mine.*: not valid YAML"),
        ("rules: !!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_broken_yaml_is_one_line_with_the_place(text, said):
    with pytest.raises(QuantkitError, match=said) as raised:
        parse_recipe(text, "mine", "mine")
    assert "\n" not in str(raised.value)
