from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.manifest import (
    FILE,
    Manifest,
    atomic_folder,
    check_output,
    content_key,
    model_key,
    read_json,
    versions,
    write_json,
)


def manifest() -> Manifest:
    return Manifest(
        command=["quantkit", "export", "--fp4", "model"],
        model={"spec": "model", "parameters": 10},
        recipe={"name": "nvfp4", "source": "--fp4 picked nvfp4"},
        plan=[{"layer": "fc", "weight_format": "nvfp4"}],
        coverage={"parameters": 10},
    )


def test_a_manifest_survives_the_file(tmp_path):
    written = manifest()
    assert written.write(tmp_path) == tmp_path / "quantkit.json"
    assert Manifest.read(tmp_path) == written
    content = json.loads((tmp_path / FILE).read_text())
    assert content["schema"] == 1
    assert content["tool"]["name"] == "quantkit"
    assert content["versions"]["torch"] == versions()["torch"]
    assert "multiplies" in content["conventions"]["scale"]


def test_a_folder_without_manifest_or_with_a_newer_one_is_an_error(tmp_path):
    with pytest.raises(
        QuantkitError, match=r"not a quantkit artefact folder: it has no quantkit\.j"
    ):
        Manifest.read(tmp_path)
    write_json(tmp_path / FILE, {"schema": 2})
    with pytest.raises(QuantkitError, match="schema 2, this quantkit reads up to 1"):
        Manifest.read(tmp_path)
    write_json(tmp_path / FILE, {"schema": 1, "plan": []})
    with pytest.raises(QuantkitError, match="lacks command, model, recipe, coverage"):
        Manifest.read(tmp_path)
    write_json(tmp_path / FILE, [1])
    with pytest.raises(QuantkitError, match="not a quantkit manifest"):
        Manifest.read(tmp_path)


def test_a_key_this_version_does_not_know_is_ignored(tmp_path):
    path = manifest().write(tmp_path)
    write_json(path, {**read_json(path), "later": 1})
    assert Manifest.read(tmp_path).recipe["name"] == "nvfp4"


def test_the_content_key_is_of_content_and_not_of_names_or_times(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        (folder / "sub").mkdir(parents=True)
        (folder / "a").write_bytes(b"x" * 100)
        (folder / "sub" / "b").write_bytes(b"y")
    os.utime(two / "a", (0, 0))
    assert content_key(one) == content_key(two)
    assert content_key(one / "a") == content_key(two / "a")
    (two / "a").write_bytes(b"x" * 99 + b"z")
    assert content_key(one) != content_key(two)
    with pytest.raises(QuantkitError, match="does not exist"):
        content_key(tmp_path / "absent")


def test_the_content_key_feels_every_boundary(tmp_path):
    assert content_key("ab", "c") != content_key("a", "bc")
    assert content_key("ab") == content_key(b"ab")
    assert content_key("a", "b") != content_key("b", "a")
    (tmp_path / "f").write_bytes(b"ab")
    assert content_key(tmp_path / "f") != content_key("ab")


def test_a_renamed_file_changes_a_folder_s_key(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").write_bytes(b"1")
    before = content_key(tmp_path / "d")
    (tmp_path / "d" / "a").rename(tmp_path / "d" / "b")
    assert content_key(tmp_path / "d") != before


def test_json_is_strict_and_a_failed_number_is_recorded_as_text(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": [math.nan, math.inf, -math.inf, 1.5], "b": (1, None), "ü": "é"})
    assert read_json(path) == {"a": ["nan", "inf", "-inf", 1.5], "b": [1, None], "ü": "é"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_value_that_json_cannot_hold_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": np.float32(1)})
    assert read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_reading_what_is_not_json_is_one_line(tmp_path):
    with pytest.raises(QuantkitError, match="does not exist"):
        read_json(tmp_path / "absent.json")
    (tmp_path / "x.json").write_text('{"a": ')
    with pytest.raises(QuantkitError, match="is not valid JSON"):
        read_json(tmp_path / "x.json")


def test_a_folder_appears_only_when_it_is_complete(tmp_path):
    out = tmp_path / "made" / "out"
    with atomic_folder(out) as work:
        (work / "a").write_text("1")
        assert work.parent == out.parent
        assert not out.exists()
    assert (out / "a").read_text() == "1"
    assert os.listdir(out.parent) == ["out"]


def test_a_finished_folder_has_ordinary_permissions(tmp_path):
    (tmp_path / "plain").mkdir()
    with atomic_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, QuantkitError])
def test_whatever_ends_the_block_leaves_nothing_behind(tmp_path, error):
    def fail() -> None:
        with atomic_folder(tmp_path / "out") as work:
            (work / "a").write_text("1")
            raise error("stop")

    with pytest.raises(error):
        fail()
    assert os.listdir(tmp_path) == []


def test_an_empty_folder_may_be_filled_and_a_full_one_not(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with atomic_folder(out) as work:
        (work / FILE).write_text("{}")
    with pytest.raises(QuantkitError, match="not empty; pass --overwrite"), atomic_folder(out):
        raise AssertionError("the block must not run")
    with pytest.raises(QuantkitError, match="is a file; name a folder"):
        check_output(out / FILE, overwrite=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(QuantkitError, match="is a file; name a folder"):
        check_output(tmp_path / "pipe", overwrite=True)


def test_overwriting_replaces_the_whole_folder_and_only_on_success(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / FILE).write_text("{}")
    (out / "old").write_text("old")
    with pytest.raises(ValueError, match="stop"), atomic_folder(out, overwrite=True):
        raise ValueError("stop")
    assert sorted(os.listdir(out)) == ["old", FILE]
    with atomic_folder(out, overwrite=True) as work:
        (work / "new").write_text("new")
    assert os.listdir(out) == ["new"]
    assert os.listdir(tmp_path) == ["out"]


def test_overwrite_never_removes_a_folder_that_quantkit_did_not_make(tmp_path):
    out = tmp_path / "home"
    out.mkdir()
    (out / "thesis.tex").write_text("years")
    with pytest.raises(QuantkitError, match="quantkit did not make it and will not remove it"):
        check_output(out, overwrite=True)
    assert (out / "thesis.tex").exists()


def test_a_folder_filled_by_another_run_meanwhile_is_not_replaced(tmp_path):
    out = tmp_path / "out"

    def lose_the_race() -> None:
        with atomic_folder(out) as work:
            (work / "mine").write_text("")
            out.mkdir()
            (out / "theirs").write_text("")

    with pytest.raises(QuantkitError, match="is not empty"):
        lose_the_race()
    assert os.listdir(out) == ["theirs"]
    assert os.listdir(tmp_path) == ["out"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    with (
        pytest.raises(QuantkitError, match=r"the disk is full \(.* GB free\) while writing"),
        atomic_folder(tmp_path / "out"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == []


def test_a_real_full_device_is_reported_the_same_way(tmp_path):
    with (
        pytest.raises(QuantkitError, match="the disk is full"),
        atomic_folder(tmp_path / "out"),
        Path("/dev/full").open("wb", buffering=0) as file,
    ):
        file.write(b"x")


def test_other_system_errors_inside_the_block_keep_their_type(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_folder(tmp_path / "out") as work:
        (work / "absent").read_text()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(QuantkitError, match="cannot write"), atomic_folder(Path("/proc/out")):
        raise AssertionError("the block must not run")


def test_the_key_of_a_checkpoint_is_of_its_files_and_nothing_outside(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    export = {
        "files": [{"name": "a.safetensors"}, {"name": "../outside"}, 3],
        "described": ["config.json"],
    }
    (folder / FILE).write_text(json.dumps({"export": export}))
    assert model_key(folder) is None
    (tmp_path / "outside").write_text("1")
    assert model_key(folder) is None
    keys = []
    for name in ("a.safetensors", "config.json"):
        for text in ("1", "2"):
            (folder / name).write_text(text)
            keys.append(model_key(folder))
    assert None not in keys
    assert len(set(keys)) == 4
    (folder / "report.html").write_text("1")
    assert model_key(folder) == keys[-1]
