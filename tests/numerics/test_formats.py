"""The table of formats against ml_dtypes' own description of the types."""

from __future__ import annotations

import ml_dtypes
import pytest

from quantkit.errors import QuantkitError
from quantkit.numerics.formats import E2M1, E4M3, E5M2, FORMATS, Element, get_format


@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2], ids=lambda e: e.name)
def test_elements_are_those_of_ml_dtypes(element: Element) -> None:
    info = ml_dtypes.finfo(getattr(ml_dtypes, element.name))
    assert (element.bits, element.max) == (info.bits, float(info.max))
    assert 2.0**element.emin == float(info.smallest_normal)
    assert 2.0 ** (element.emin - element.man) == float(info.smallest_subnormal)


@pytest.mark.parametrize(("name", "nbytes"), [("nvfp4", 2308), ("mxfp4", 2176), ("mxfp8", 4224)])
def test_bytes_of_a_64_by_64_layer(name: str, nbytes: int) -> None:
    assert FORMATS[name].nbytes((64, 64)) == nbytes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvfp4", (6, 8)),
        ("mxfp4", (6, 4)),
        ("mxfp8", (6, 4)),
        ("fp8", (1, 1)),
        ("fp8_channel", (6, 1)),
        ("fp8_block", (1, 1)),
        ("fp8_group", (6, 1)),
        ("fp8_e5m2", (1, 1)),
    ],
)
def test_scale_shapes(name: str, expected: tuple[int, int]) -> None:
    assert FORMATS[name].scale_shape((6, 128)) == expected


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("fp8_block", (576, 7168), (5, 56)),
        ("fp8_block", (128, 129), (1, 2)),
        ("fp8_block", (1, 1), (1, 1)),
        ("fp8_group", (3, 200), (3, 2)),
    ],
)
def test_a_short_last_block_has_a_scale_too(
    name: str, shape: tuple[int, int], expected: tuple[int, int]
) -> None:
    """DeepSeek-V3: kv_a_proj_with_mqa is [576, 7168], its scales [5, 56]."""
    assert FORMATS[name].fits(shape)
    assert FORMATS[name].scale_shape(shape) == expected
    assert FORMATS[name].nbytes(shape) == shape[0] * shape[1] + 4 * expected[0] * expected[1]


def test_only_the_ragged_formats_take_a_short_block() -> None:
    blocked = [fmt for fmt in FORMATS.values() if fmt.block[1] is not None]
    assert [fmt.name for fmt in blocked if fmt.fits((1, 129))] == ["fp8_block", "fp8_group"]


def test_an_empty_tensor_does_not_fit() -> None:
    assert not any(fmt.fits((0, 64)) or fmt.fits((4, 0)) for fmt in FORMATS.values())


def test_an_unknown_format_is_named_with_the_known_ones() -> None:
    with pytest.raises(QuantkitError, match=r"nvfp5.*nvfp4"):
        get_format("nvfp5")
