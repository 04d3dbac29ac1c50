from __future__ import annotations

from quantkit.evaluate.differences import Difference, Differences, names_of


def test_counts_of_chunks_add_up_and_the_first_place_is_the_smallest() -> None:
    found = Differences()
    found.count("layer", "a", "codes", 2, 100, (7, 3))
    found.count("layer", "a", "codes", 1, 100, (2, 9))
    assert found.rows({}) == [
        Difference("layer", "a", "codes", "3 of 100 differ, the first at [2, 9]")
    ]


def test_files_come_first_then_layers_then_tensors_by_name() -> None:
    found = Differences()
    found.say("tensor", "b", "missing", "gone")
    found.say("layer", "z", "format", "other")
    found.say("tensor", "a", "extra", "new")
    found.say("file", "config.json", "content", "changed")
    rows = found.rows({})
    assert [row.name for row in rows] == ["config.json", "z", "a", "b"]
    assert names_of(rows, "tensor") == ["a", "b"]
    assert str(rows[1]) == "z: format: other"


def test_bytes_of_a_listed_layer_are_the_same_finding_and_its_missing_tensors_are_not() -> None:
    found = Differences()
    found.say("layer", "a", "tensor scale", "1 on disk, 2 made")
    for name in ("a.scale", "b.scale"):
        found.count("tensor", name, "bytes", 1, 4, (0,))
    found.say("tensor", "a.codes", "missing", "gone")
    owners = {"a.scale": "a", "b.scale": "b", "a.codes": "a"}
    assert [(row.name, row.what) for row in found.rows(owners)] == [
        ("a", "tensor scale"),
        ("a.codes", "missing"),
        ("b.scale", "bytes"),
    ]
