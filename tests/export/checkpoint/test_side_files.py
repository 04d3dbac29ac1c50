from __future__ import annotations

import os
from pathlib import Path

from quantkit.export.checkpoint.side_files import find_side_files


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def test_what_a_model_needs_comes_along(tmp_path: Path) -> None:
    names = ("tokenizer.json", "chat_template.jinja", "1_Pooling/config.json", "modeling_x.py")
    write(tmp_path, *names, "2_Dense/model.safetensors")
    files, left_out = find_side_files(tmp_path, tmp_path)
    assert {file.name for file in files} == {*names, "2_Dense/model.safetensors"}
    assert left_out == {}


def test_weights_that_are_replaced_stay_behind_with_a_reason(tmp_path: Path) -> None:
    write(tmp_path, "model-00001-of-00002.safetensors", "model.safetensors.index.json", "x.onnx")
    files, left_out = find_side_files(tmp_path, tmp_path)
    assert files == []
    assert set(left_out.values()) == {"the weights that this output replaces"}


def test_pickles_and_copies_and_descriptions_of_another_quantization_stay_behind(
    tmp_path: Path,
) -> None:
    """Case C28: a pickle must not travel with a checkpoint that was made to be safe."""
    write(tmp_path, "pytorch_model.bin", "sub/x.pt", "onnx/model.onnx", "hf_quant_config.json")
    files, left_out = find_side_files(tmp_path, tmp_path)
    assert files == []
    assert set(left_out) == {"pytorch_model.bin", "sub/x.pt", "onnx", "hf_quant_config.json"}


def test_the_other_components_of_a_pipeline_come_along_with_their_weights(tmp_path: Path) -> None:
    write(
        tmp_path,
        *("model_index.json", "vae/diffusion_pytorch_model.safetensors", "flux.safetensors"),
        *("transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"),
    )
    files, left_out = find_side_files(
        tmp_path, tmp_path / "transformer", frozenset({"transformer/config.json"})
    )
    assert [file.name for file in files] == [
        "model_index.json",
        "vae/diffusion_pytorch_model.safetensors",
    ]
    assert set(left_out) == {"flux.safetensors", "transformer/diffusion_pytorch_model.safetensors"}


def test_links_in_a_circle_and_pipes_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path, "config.json")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    files, left_out = find_side_files(tmp_path, tmp_path)
    assert [file.name for file in files] == ["config.json"]
    assert set(left_out) == {"loop", "pipe"}


def test_version_control_and_the_manifest_of_another_run_are_not_side_files(tmp_path: Path) -> None:
    write(tmp_path, ".git/config", ".gitattributes", "quantkit.json", "LICENSE")
    files, _ = find_side_files(tmp_path, tmp_path)
    assert [file.name for file in files] == ["LICENSE"]
