"""Every name that a LoRA may use for a weight of the checkpoint.

A LoRA names modules as its trainer's wrapper, pipeline or original code did, a checkpoint as its
own. Instead of turning the LoRA's names into the checkpoint's, which for kohya's underscores is a
guess, the checkpoint's names are turned into all spellings and looked up. Similar names are never
good enough: they only help to say what is wrong.
"""

from __future__ import annotations

import difflib
import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from quantkit.errors import QuantkitError
from quantkit.models.lora.flux import Span, flux_names

# Wrappers and pipelines put these before a module's name, and one model may stand in another.
BEGINNINGS = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "unet.",
    "text_model.",
    "language_model.",
    "model.",
    "module.",
)

WORD = re.compile(r"[^._]+")

Target = tuple[Span, ...]


class Names:
    """Look-up of the modules of a checkpoint by the spellings of peft, diffusers, kohya and BFL."""

    def __init__(self, weights: Mapping[str, Sequence[int]]) -> None:
        """weights: name of every tensor of the checkpoint -> shape."""
        self._modules: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in weights.items():
            self._modules.setdefault(name.rpartition(".")[0], {})[name] = tuple(shape)
        self._spelled: dict[str, dict[str, list[tuple[int, str]]]] = {}

    def find(self, module: str) -> Target | None:
        """Where a LoRA's module is in the checkpoint; None when it is not there.

        Raises QuantkitError when the name fits several modules.
        """
        for separator in (".", "_"):
            index = self._index(separator)
            for spelling in shortened(module.replace(".", separator), separator):
                found = sorted(index.get(spelling, ()))
                # The module whose name had least taken away is meant.
                nearest = [name for depth, name in found if depth == found[0][0]]
                if len(nearest) > 1:
                    raise QuantkitError(
                        f"The LoRA's {module!r} may be any of {', '.join(nearest[:3])}; the "
                        "checkpoint holds more than one model with such names. Give the one "
                        "component it is for."
                    )
                if nearest:
                    return (Span(nearest[0]),)
        for separator in (".", "_"):
            for spelling in shortened(module.replace(".", separator), separator):
                if spelling in self._flux:
                    return self._flux[spelling]
        return None

    def _index(self, separator: str) -> Mapping[str, list[tuple[int, str]]]:
        """Spelling -> (how many beginnings were taken away, module) of all it may mean."""
        if separator not in self._spelled:
            index: dict[str, list[tuple[int, str]]] = {}
            for module in self._modules:
                for depth, name in enumerate(shortened(module)):
                    index.setdefault(name.replace(".", separator), []).append((depth, module))
            self._spelled[separator] = index
        return self._spelled[separator]

    @cached_property
    def _flux(self) -> Mapping[str, Target]:
        bare: dict[str, str] = {}
        shapes: dict[str, Sequence[int]] = {}
        for module, tensors in self._modules.items():
            weight = tensors.get(f"{module}.weight", ())
            if len(weight) == 2:
                *_, name = shortened(module)
                bare[name], shapes[module] = module, weight
        found: dict[str, Target] = {}
        for name, target in flux_names(bare, shapes):
            for spelling in (name, name.replace(".", "_")):
                found.setdefault(spelling, target)
        return found

    def tensors(self, module: str) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of the parameters of a module of the checkpoint."""
        return self._modules[module]

    def nearest(self, module: str) -> str | None:
        """The most similar name, for an error message."""
        *_, name = shortened(module)
        words = set(WORD.findall(name))

        def shared(spelling: str) -> int:
            return len(words.intersection(WORD.findall(spelling)))

        # Comparing letter by letter takes seconds where experts have twenty thousand names.
        spellings = heapq.nlargest(50, self._index("." if "." in name else "_"), key=shared)
        return next(iter(difflib.get_close_matches(name, spellings, 1, 0.5)), None)


def shortened(name: str, separator: str = ".") -> Iterator[str]:
    """The name, then without its first known beginning, and so on."""
    yield name
    for beginning in BEGINNINGS:
        beginning = beginning.replace(".", separator)
        if name.startswith(beginning) and len(name) > len(beginning):
            yield from shortened(name.removeprefix(beginning), separator)
            return
