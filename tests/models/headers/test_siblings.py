"""Groups of linears that read one tensor, by spelling and shape."""

from __future__ import annotations

import pytest

from quantkit.models.headers.siblings import find_groups

H, W = 64, 256


def groups(shapes: dict[str, tuple[int, int]], *norms: str) -> set[frozenset[str]]:
    first = find_groups(shapes, norms)
    assert all(first[name] == first[first[name]] for name in shapes)
    members: dict[str, set[str]] = {}
    for name, leader in first.items():
        members.setdefault(leader, set()).add(name)
    return {frozenset(names) for names in members.values() if len(names) > 1}


def squares(*names: str) -> dict[str, tuple[int, int]]:
    return dict.fromkeys(names, (H, H))


@pytest.mark.parametrize(
    "spelled",
    ["q_proj k_proj v_proj", "query key value", "to_q to_k to_v", "q k v", "wq wk wv",
     "add_q_proj add_k_proj add_v_proj", "q_lin k_lin v_lin", "linear_q linear_k linear_v",
     "w1q w1k w1v", "to_query to_key to_value", "query_proj key_proj value_proj",
     "proj_q proj_k proj_v"],
)  # fmt: skip
def test_query_key_and_value_read_one_tensor_however_they_are_spelled(spelled: str) -> None:
    names = [f"blocks.3.attn.{part}" for part in spelled.split()]
    assert groups(squares(*names, "blocks.3.attn.out", "blocks.2.attn.x")) == {frozenset(names)}


def test_the_first_of_a_group_in_the_order_given_names_it() -> None:
    first = find_groups(squares("a.k_proj", "a.o_proj", "a.q_proj", "a.v_proj"), ())
    assert first == {
        "a.k_proj": "a.k_proj",
        "a.o_proj": "a.o_proj",
        "a.q_proj": "a.k_proj",
        "a.v_proj": "a.k_proj",
    }


@pytest.mark.parametrize(
    "spelled",
    ["gate_proj up_proj down_proj", "w1 w3 w2", "wi_0 wi_1 wo", "linear_1 linear_3 linear_2",
     "c_fc_0 c_fc_1 c_proj", "gate_layer proj out", "w1 w2 c_proj", "gate up down"],
)  # fmt: skip
def test_gate_and_up_are_known_by_their_shapes(spelled: str) -> None:
    gate, up, down = (f"layers.0.mlp.{part}" for part in spelled.split())
    assert groups({gate: (W, H), up: (W, H), down: (H, W)}) == {frozenset({gate, up})}


def test_three_square_layers_are_no_gated_mlp() -> None:
    assert groups(squares("a.fc1", "a.fc2", "a.fc3")) == set()
    assert groups({"a.fc1": (W, H), "a.fc2": (W, W), "a.fc3": (H, W)}) == set()


def test_layers_of_another_width_are_never_siblings() -> None:
    shapes = squares("attn.to_q") | {"attn.to_k": (H, 32), "attn.to_v": (H, 32)}
    assert groups(shapes) == {frozenset({"attn.to_k", "attn.to_v"})}


@pytest.mark.parametrize(
    ("kind", "spelled"),
    [
        ("layer.1.EncDecAttention", "q k v"),
        ("encoder_attn", "q_proj k_proj v_proj"),
        ("crossattention.self", "query key value"),
        ("cross_attn", "q k v"),
        ("cross_attention", "to_query to_key to_value"),
    ],
)
def test_cross_attention_queries_are_apart_and_contexts_are_one(kind: str, spelled: str) -> None:
    """Every block is given the same context: its keys and values read the very same tensor."""
    query, key, value = spelled.split()
    paths = [f"decoder.block.{index}.{kind}" for index in range(2)]
    found = groups(squares(*(f"{path}.{part}" for path in paths for part in spelled.split())))
    assert found == {frozenset(f"{path}.{part}" for path in paths for part in (key, value))}
    assert not any(f"{path}.{query}" in group for path in paths for group in found)


def test_the_second_attention_of_a_block_is_cross_only_beside_attn1() -> None:
    """SD3 calls its first attention `attn`, and `attn2` reads the image once more."""
    parts = ("to_q", "to_k", "to_v")
    cross = groups(squares(*(f"b.0.{a}.{p}" for a in ("attn1", "attn2") for p in parts)))
    assert frozenset({"b.0.attn2.to_k", "b.0.attn2.to_v"}) in cross
    joint = groups(squares(*(f"b.0.{a}.{p}" for a in ("attn", "attn2") for p in parts)))
    assert frozenset(f"b.0.attn2.{part}" for part in parts) in joint
    moving = "down.0.motion_modules.0"
    both = groups(squares(*(f"{moving}.{a}.{p}" for a in ("attn1", "attn2") for p in parts)))
    assert frozenset(f"{moving}.attn2.{part}" for part in parts) in both


def test_attention_between_streams_joins_no_blocks() -> None:
    """LTX-2: what the other stream computed differs from block to block."""
    parts = ("to_q", "to_k", "to_v")
    names = [f"b.{i}.audio_to_video_attn.{part}" for i in range(2) for part in parts]
    assert groups(squares(*names)) == {
        frozenset({f"b.{i}.audio_to_video_attn.{part}" for part in parts[1:]}) for i in range(2)
    }


def test_image_context_of_a_cross_attention_is_a_context_of_its_own() -> None:
    """Wan image-to-video: k_img and v_img, or add_k_proj and add_v_proj without a query."""
    names = [f"blocks.{i}.cross_attn.{p}" for i in range(2) for p in ("q", "k", "v")]
    image = [f"blocks.{i}.cross_attn.{p}" for i in range(2) for p in ("k_img", "v_img")]
    assert frozenset(image) in groups(squares(*names, *image))
    added = ["attn.add_k_proj", "attn.add_v_proj"]
    assert groups(squares("attn.to_q", *added)) == {frozenset(added)}


def test_a_flux_single_block_reads_one_tensor_four_times() -> None:
    block = "single_transformer_blocks.0."
    names = [block + x for x in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")]
    assert groups(squares(*names, block + "proj_out")) == {frozenset(names)}


def test_latent_attention_reads_the_tokens_twice_and_the_latent_twice() -> None:
    """DeepSeek-V3.2: the indexer reads what the attention reads."""
    attn = "model.layers.0.self_attn."
    shapes = {
        attn + "q_a_proj": (24, H),
        attn + "kv_a_proj_with_mqa": (20, H),
        attn + "indexer.wk": (16, H),
        attn + "indexer.weights_proj": (2, H),
        attn + "q_b_proj": (H, 24),
        attn + "indexer.wq_b": (32, 24),
        attn + "kv_b_proj": (H, 20),
    }
    tokens, latent = [*shapes][:4], [*shapes][4:6]
    assert groups(shapes) == {frozenset(tokens), frozenset(latent)}


def test_linear_attention_joins_its_input_projections() -> None:
    names = [f"layers.0.linear_attn.in_proj_{part}" for part in ("qkvz", "ba")]
    assert groups(squares(*names, "layers.0.linear_attn.out_proj")) == {frozenset(names)}


def test_memories_with_key_and_value_and_no_query_stay_apart() -> None:
    """RWKV: key, value and receptance read three mixtures of the tokens."""
    assert groups(squares(*(f"att.{part}" for part in ("key", "value", "receptance")))) == set()


def test_a_block_with_one_norm_feeds_attention_and_mlp_from_it() -> None:
    """Cohere, Phi-2, GPT-J, Falcon."""
    block = "model.layers.0."
    reads = [block + f"self_attn.{x}_proj" for x in "qkv"] + [block + "mlp.fc1"]
    shapes = squares(*reads, block + "self_attn.dense", block + "mlp.fc2")
    assert groups(shapes, block + "input_layernorm") == {frozenset(reads)}
    two = groups(shapes, block + "input_layernorm", block + "post_attention_layernorm")
    assert two == {frozenset(reads[:3])}
