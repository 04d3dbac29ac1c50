"""A model with LoRAs merged in is a Source like any other, for tracing, calibration and export.

Only `read` changes, so nothing has to know of LoRAs and nothing is held in memory. Writing a merged
checkpoint first was refused: it is a copy of the model, rounded to its dtype once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quantkit.models.lora.file import Lora
from quantkit.models.lora.match import match
from quantkit.models.lora.merge import merge

if TYPE_CHECKING:
    from quantkit.models.model_source import Source


def merge_loras(
    source: Source, loras: Sequence[Lora], *, transposed: Collection[str] | None = None
) -> Source:
    """The same model with LoRAs merged: `read_weight` gives float32 for what they change.

    transposed: names of the weights stored [in, out], as a trace finds them; see `match`, which
    raises QuantkitError for a LoRA that does not fit. `state` keeps the dtypes of the checkpoint.
    `content_key` is another one, and the notes of the match are added to `notes`.
    """
    from quantkit.models.skeleton import aliases

    shapes = {name: stored.shape for name, stored in source.state.items()}
    groups = dict.fromkeys(aliases(source.build()).values())
    deltas = match(loras, shapes, transposed=transposed, tied=groups)
    return replace(
        source,
        read=lambda name: merge(deltas, name, source.read(name)),
        digest=lambda: digest_merged(source.digest(), loras),
        notes=(*source.notes, *deltas.notes),
        loras=(*source.loras, *loras),
    )


def digest_merged(base: str, loras: Sequence[Lora]) -> str:
    """sha256 over a base model's digest, and file and scale of every LoRA, in order."""
    total = hashlib.sha256(base.encode())
    for lora in loras:
        total.update(f"\0{lora.digest()}\0{lora.scale!r}".encode())
    return total.hexdigest()
