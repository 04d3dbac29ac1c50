"""What open_model accepts, and one clear line for all that it does not (case C28)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.errors import QuantkitError
from quantkit.models.source import Source, open_model
from tests.zoo import write_diffusers, write_transformers


def write_config(folder: Path, **values: object) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    write_diffusers("flux", tmp_path / "transformer")
    write_transformers("clip_text", tmp_path / "text_encoder")
    (tmp_path / "scheduler").mkdir()
    index = {
        "_class_name": "FluxPipeline",
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    return tmp_path


def test_pipeline_opens_its_denoiser_and_any_named_component(pipeline: Path) -> None:
    assert open_model(str(pipeline)).model_class == "FluxTransformer2DModel"
    encoder = open_model(f"{pipeline}:text_encoder")
    assert (encoder.kind, encoder.model_class) == ("transformers", "CLIPTextModel")
    assert open_model(str(pipeline / "transformer")).kind == "diffusers"


def test_pipeline_without_the_component_lists_what_it_has(pipeline: Path) -> None:
    with pytest.raises(QuantkitError, match=r"no component 'vae'.*transformer, text_encoder"):
        open_model(f"{pipeline}:vae")
    shutil.rmtree(pipeline / "transformer")
    with pytest.raises(QuantkitError, match=r"no transformer or unet.*text_encoder"):
        open_model(str(pipeline))


def test_folder_name_with_a_colon_is_a_folder(tmp_path: Path) -> None:
    spec = write_transformers("bert", tmp_path / "a:b")
    assert open_model(spec).model_class == "BertModel"


def test_tasks_follow_the_class(opened: Callable[[str], Source]) -> None:
    assert {name: opened(name).task for name in ("llama", "bert", "vit", "dinov2", "sd3")} == {
        "llama": "text-generation",
        "bert": "feature-extraction",
        "vit": "image-classification",
        "dinov2": "image-feature-extraction",
        "sd3": "text-to-image",
    }


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("nowhere", "does not exist"),
        ("./a/b", "does not exist"),
        ("/a/b", "does not exist"),
        ("model.py", "say which function"),
        ("nowhere.py:f", "does not exist"),
    ],
)
def test_missing_things_are_one_line(spec: str, expected: str) -> None:
    with pytest.raises(QuantkitError, match=expected) as caught:
        open_model(spec)
    assert spec.partition(":")[0] in str(caught.value)


def test_unknown_hub_id_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(name: str, **_: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError(f"cannot find {name}\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(QuantkitError, match="some/model is no folder here") as caught:
        open_model("some/model")
    assert "\n" not in str(caught.value)


def test_hub_id_is_downloaded_without_code_or_pickles_and_opened_as_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fnmatch

    import huggingface_hub

    folder = write_transformers("bert", tmp_path)
    patterns: list[str] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        patterns.extend(allow_patterns)
        return folder

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_model("some/model").model_class == "BertModel"
    for file in ("modeling.py", "pytorch_model.bin", "x.pt", "model.ckpt"):
        assert not any(fnmatch.fnmatch(file, pattern) for pattern in patterns)


def test_plain_file_and_empty_folder_are_errors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(QuantkitError, match="is a file"):
        open_model(str(tmp_path / "model.safetensors"))
    with pytest.raises(QuantkitError, match="neither config"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', "\udc80"])
def test_bad_configuration_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(QuantkitError, match=r"config\.json"):
        open_model(str(tmp_path))


def test_wrong_classes_are_one_line(tmp_path: Path) -> None:
    for values, expected in (
        ({"model_type": "no_such_model"}, "no model type 'no_such_model'"),
        ({"model_type": ["bert"]}, "no model type"),
        ({"model_type": "bert", "architectures": ["NoSuchModel"]}, "no class for NoSuchModel"),
        ({"model_type": "bert", "architectures": ["BertConfig"]}, "no class for BertConfig"),
        ({"_class_name": "NoSuchModel"}, "no model class 'NoSuchModel'"),
        ({"_class_name": "FluxPipeline"}, "no model class 'FluxPipeline'"),
        ({"_class_name": "AutoencoderKL"}, "no example inputs for AutoencoderKL"),
    ):
        with pytest.raises(QuantkitError, match=expected):
            open_model(str(write_config(tmp_path, **values)))


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    """C28: neither to open an unknown type, nor where a native class exists."""
    sentinel = tmp_path / "ran"
    code = f"open({str(sentinel)!r}, 'w').close()\nclass X: pass\n"
    for name in ("unknown", "native"):
        (tmp_path / name).mkdir()
    write_transformers("bert", tmp_path / "native")
    config = json.loads((tmp_path / "native" / "config.json").read_text())
    auto_map = {"auto_map": {"AutoConfig": "modeling.X", "AutoModel": "modeling.X"}}
    write_config(tmp_path / "unknown", model_type="my_own", architectures=["X"], **auto_map)
    write_config(tmp_path / "native", **config, **auto_map)
    for name in ("unknown", "native"):
        (tmp_path / name / "modeling.py").write_text(code)
    with pytest.raises(QuantkitError, match=r"auto_map\) is never run"):
        open_model(str(tmp_path / "unknown"))
    assert open_model(str(tmp_path / "native")).model_class == "BertModel"
    assert not sentinel.exists()
