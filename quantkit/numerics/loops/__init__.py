"""The loops of the kernels, written for numba: the only files that import it, and only to compile.

A loop takes flat arrays as pointers, with their extents as integers, so that the machine code needs
no numba at run time (`machine_code.py`). What makes LLVM turn a loop into vector instructions, and
what a careless edit loses, measured on Zen 4 and the same with AVX2 alone:

* The innermost loop has a constant length (16 or 32 elements); with a variable one the vector body
  is never reached, because a block is shorter than it.
* Indices are flat and cannot be negative: either a multiple of a loop variable plus a constant, or
  unsigned. numba wraps negative indices around, and where it has to ask, nothing is vectorised.
* Every integer operation is cast back to its width. numba computes in 64 bits, and LLVM narrows
  that again only where it can prove it, so shift counts are constants and not arguments.
* No array is read and written under two names in a loop: LLVM would guard it against overlap.

No fastmath anywhere: the loops agree with `codec.py` bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quantkit.numerics.formats import E2M1, E4M3, E5M2
from quantkit.numerics.loops import amax, decode, encode, fp4, half, products, scales

# name -> (function, the types of its arguments; a star marks a pointer).
LOOPS: Mapping[str, tuple[Callable[..., None], str]] = {
    "group_amax_16": (amax.group_amax_16, "uint32* int64 uint32*"),
    "group_amax_32": (amax.group_amax_32, "uint64* int64 uint32*"),
    "fold_amax": (amax.fold_amax, "uint32* int64 int64 int64 int64 uint32*"),
    "widen_half": (half.widen_half, "uint16* int64 uint32*"),
    "add_product": (
        products.add_product,
        "float32* float32* int64 int64 int64 int64 int64 float32 float32* float32*",
    ),
    "sum_errors": (products.sum_errors, "float32* float32* float32* int64 int64 float64*"),
    "e4m3_scales": (scales.e4m3_scales, "float32* int64 float32 float32 uint8* float32*"),
    "e8m0_scales": (scales.e8m0_scales, "uint32* int64 int64 int64 uint8* uint32*"),
    **{
        f"encode_{element.name}_{width}": (
            encode.encoder(element, width),
            f"uint{width}* int64 int64 int64 int64 float32* uint8*",
        )
        for element in (E4M3, E5M2)
        for width in (16, 32)
    },
    f"encode_{E2M1.name}_32": (
        encode.encode_fp4_32,
        "uint32* int64 int64 int64 int64 float32* uint32* uint8*",
    ),
    f"encode_{E2M1.name}_16": (
        fp4.encode_fp4_16,
        "uint16* int64 int64 float32* int16* uint16* uint8*",
    ),
    **{
        f"decode_{element.name}": (
            decode.decoder(element),
            f"uint8* int64 int64 int64 int64 float32* {out}",
        )
        for element, out in ((E2M1, "uint64*"), (E4M3, "float32*"), (E5M2, "float32*"))
    },
}
