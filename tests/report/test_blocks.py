from __future__ import annotations

import pytest

from quantkit.report.blocks import Cell, Column, Section, Table


def test_a_row_has_a_cell_for_every_column():
    with pytest.raises(AssertionError, match="caption: 1 cells, 2 columns"):
        Table("caption", (Column("a"), Column("b")), ((Cell("x"),),))


def test_a_section_can_be_linked_to():
    assert Section("Conventions, and versions", ()).anchor == "conventions-and-versions"
