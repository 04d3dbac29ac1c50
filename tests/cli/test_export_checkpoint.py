"""`quantkit export --to a checkpoint`, as a person meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quantkit.cli.export import Target
from quantkit.export.checkpoint.targets import CHECKPOINT_TARGETS
from quantkit.export.run import TARGETS
from quantkit.models.checkpoint import Checkpoint
from tests.cli.run import quantkit
from tests.export.checkpoint.models import llama_tensors, write_model, write_tensors


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be read only."""
    return write_model(tmp_path_factory.mktemp("llama") / "model", llama_tensors())


@pytest.fixture(scope="module")
def quantized(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be read only."""
    out = tmp_path_factory.mktemp("quantized") / "out"
    done = quantkit("export", "--fp4", "--to", "modelopt", llama, "-o", out, "--data-free")
    assert done.code == 0, done.err
    return out


def test_the_choices_of_to_are_the_tables() -> None:
    assert {t.value for t in Target} == (TARGETS.keys() | CHECKPOINT_TARGETS.keys()) - {"quantkit"}


def test_an_export_says_what_it_wrote_and_what_to_do_next(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = quantkit("export", "--fp4", "--to", "modelopt", llama, "-o", out, "--data-free")
    assert done.code == 0
    assert "14 layers nvfp4 x nvfp4" in done.out
    assert "7 layers kept" in done.out
    assert "--data-free" in done.out
    assert done.err.splitlines()[-1].startswith("next: quantkit ")


def test_json_is_on_stdout_and_nothing_else(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("export", "--recipe", "mxfp4-weight-only", "--to", "compressed-tensors")
    done = quantkit(*arguments, llama, "-o", out, "--json")
    result = json.loads(done.out)
    assert result["output"] == str(out)
    assert [file["name"] for file in result["files"]] == ["model.safetensors"]


def test_a_dry_run_shows_the_plan_and_writes_nothing(llama: Path, tmp_path: Path) -> None:
    done = quantkit("export", "--fp4", "--to", "modelopt", llama, "--dry-run", "--json")
    result = json.loads(done.out)
    assert sum(row["weight_format"] == "nvfp4" for row in result["plan"]) == 14
    assert result["expected_peak_memory"] < 600e6
    assert list(tmp_path.iterdir()) == []


def test_fp8_means_what_the_target_can_hold(llama: Path, tmp_path: Path) -> None:
    """Per channel with static inputs is no ModelOpt algorithm; vLLM would refuse the file."""
    out = tmp_path / "out"
    done = quantkit("export", "--fp8", "--to", "modelopt", llama, "-o", out, "--data-free")
    assert done.code == 0, done.err
    assert "fp8-tensor" in done.err
    assert "fp8 x fp8" in done.out


def test_torch_is_not_imported(llama: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from quantkit.cli.main import run; code = run(); "
        "sys.exit(code or 10 * ('torch' in sys.modules))"
    )
    arguments = ("export", "--fp4", "--to", "modelopt", llama, "-o", tmp_path / "o", "--data-free")
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--to", "modelopt"), "one of --fp4, --fp8 or --recipe"),
        (("--to", "modelopt", "--fp4", "--dialect", "standard"), "--dialect means nothing"),
        (("--to", "modelopt", "--fp4", "--opset", "23"), "--opset means nothing"),
        (("--to", "modelopt", "--fp4", "--compute-dtype", "bf16"), "--compute-dtype means"),
        (("--fp4", "--resume"), "--resume means nothing with --to onnx"),
        (("--fp4", "--data-free"), "--data-free means nothing with --to onnx"),
        (("--fp4", "--threads", "2"), "--threads means nothing with --to onnx"),
        (("--to", "modelopt", "--fp4", "--data-free", "--stats", "x"), "exclude each other"),
        (("--to", "modelopt", "--fp4", "--stats", "nowhere"), "nowhere"),
        (("--to", "modelopt", "--fp4", "--model", "x"), "--model is for folders"),
        (("--to", "modelopt", "--fp4", "--against", "x"), "--against is for quantized"),
        (("--to", "modelopt", "--fp4", "--lora", "nothing.safetensors"), "nothing.safetensors"),
        (("--to", "comfyui", "--recipe", "fp8-block"), "comfyui cannot hold"),
        (("--to", "diffusers", "--fp4"), "diffusers"),
        (("--to", "gguf", "--fp4"), "config.json has no max_position_embeddings, which GGUF"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], said: str, llama: Path, tmp_path: Path
) -> None:
    done = quantkit("export", *arguments, llama, "-o", tmp_path / "out")
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("--fp4",), ("--fp8",), ("--recipe", "mxfp8")])
def test_quantizing_twice_is_refused(
    arguments: tuple[str, ...], quantized: Path, tmp_path: Path
) -> None:
    """Case C28."""
    done = quantkit("export", *arguments, "--to", "torchao", quantized, "-o", tmp_path / "out")
    assert done.code == 2
    assert "quantized already" in done.err
    assert list(tmp_path.iterdir()) == []


def test_repacking_needs_no_recipe_and_twice_is_once(quantized: Path, tmp_path: Path) -> None:
    """Case C09: converting again changes nothing."""
    folders = [quantized]
    for number, to in enumerate(["compressed-tensors", "modelopt", "modelopt"]):
        folders.append(tmp_path / str(number))
        done = quantkit("export", "--to", to, folders[-2], "-o", folders[-1])
        assert done.code == 0, done.err
    files = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert files[0] == files[2] == files[3]


def test_the_output_must_be_free_or_quantkits_own(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    arguments = ("export", "--fp4", "--to", "modelopt", llama, "-o", out, "--data-free")
    assert quantkit(*arguments).code == 2
    assert quantkit(*arguments, "--overwrite").code == 2
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_a_folder_of_quantize_becomes_any_checkpoint(
    bert: Path, data: Path, tmp_path: Path
) -> None:
    """Calibrated once; the codes and scales are those of the folder."""
    folder, out = tmp_path / "folder", tmp_path / "out"
    more = ("--calibration", data, "--limit", 4)
    assert quantkit("quantize", "--fp4", bert, "-o", folder, *more).code == 0
    done = quantkit("export", "--to", "modelopt", folder, "-o", out)
    assert done.code == 0, done.err
    direct = tmp_path / "direct"
    done = quantkit("export", "--fp4", "--to", "modelopt", bert, "-o", direct, *more)
    assert done.code == 0, done.err
    one, other = Checkpoint(out), Checkpoint(direct)
    assert one.infos.keys() == other.infos.keys()
    assert all(one.read(name).tobytes() == other.read(name).tobytes() for name in one.infos)


def test_statistics_of_an_onnx_export_serve_a_checkpoint(
    bert: Path, exported: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = quantkit("export", "--fp4", "--to", "modelopt", bert, "-o", out, "--stats", exported)
    assert done.code == 0, done.err


def test_a_pickle_is_opened_only_when_asked(tmp_path: Path) -> None:
    """Case C28: and then as weights only, so that nothing in it runs."""
    import torch

    tensors = {
        name: torch.from_numpy(array.astype(np.float32)) for name, array in llama_tensors().items()
    }
    torch.save(tensors, tmp_path / "model.bin")
    arguments = ("export", "--fp4", "--to", "comfyui", tmp_path / "model.bin", "-o", tmp_path / "o")
    refused = quantkit(*arguments)
    assert refused.code == 2
    assert "pickle" in refused.err
    done = quantkit(*arguments, "--allow-pickle")
    assert done.code == 0, done.err


def test_a_bare_file_needs_no_folder(tmp_path: Path) -> None:
    file = write_tensors(tmp_path / "x.safetensors", llama_tensors())
    done = quantkit("export", "--fp4", "--to", "comfyui", file, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "quantkit.json"}
