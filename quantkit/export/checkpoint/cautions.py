"""What will be written right and still surprise: said before it is written.

A file can be exact and not load, because the runtime a user has in mind is not the one that reads
this layout. Nobody is stopped; whoever knows better has a reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.export.checkpoint.draft import Draft

EXPERTS = ".experts."
# transformers 5.24 stacks experts on loading, and drops or refuses the scales of these.
UNSTACKED = frozenset({"nvfp4", "mxfp8"})


def find_cautions(draft: Draft) -> Iterator[str]:
    """Lines for the user."""
    target, config = draft.target, draft.located.config
    if target.side_files and not config:
        yield (
            f"{draft.located.spec} has no config.json beside it: runtimes need the model's own in "
            "the output, with the quantization_config that is written there"
        )
    if target.side_files and draft.layout in ("comfyui", "scaled-fp8"):
        yield (
            f"tensors keep the names they have for ComfyUI, which {target.name}'s runtimes may not "
            "know"
        )
    if "_class_name" in config and target.name in ("compressed-tensors", "modelopt"):
        yield (
            f"diffusers does not load {target.name}; for it export to torchao, or to diffusers (a "
            "single file)"
        )
    experts = [
        n for n, s in draft.plan.schemes.items() if EXPERTS in n and s.weight.name in UNSTACKED
    ]
    if experts and target.name == "compressed-tensors":
        yield (
            f"{len(experts)} experts are written as vLLM reads them; transformers 5.24 cannot "
            "decompress NVFP4 and MXFP8 experts"
        )
