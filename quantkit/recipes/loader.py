"""Recipe files: YAML in, frozen Recipe out, and which built-in recipe a short name means.

pydantic stands at this boundary only (`schema.py`). A recipe file is flat: no imports, no
inheritance, no other file to open, so that one page answers what a layer gets. An `$import` graph
of configs, as ModelOpt has, was refused.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from quantkit.errors import QuantkitError
from quantkit.manifest import content_key
from quantkit.recipes.plan import Plan
from quantkit.recipes.recipe import Recipe
from quantkit.recipes.schema import RecipeFile, explain
from quantkit.recipes.suggest import nearest

SHORT_NAMES = {"fp4": "nvfp4", "fp8": "fp8"}


def builtin_recipes() -> list[str]:
    """Names of the recipes that ship with quantkit, sorted."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in files("quantkit.recipes").iterdir()
        if entry.name.endswith(".yaml")
    )


def load_recipe(name_or_path: str | Path) -> Recipe:
    """A built-in recipe by name, or a recipe file by path (anything that ends in .yaml or .yml).

    Raises QuantkitError for an unknown name (with the nearest ones), an unreadable file, broken
    YAML (with the line) and a key or value that does not belong (with file and dotted key).
    """
    spec = str(name_or_path)
    if Path(spec).suffix in (".yaml", ".yml"):
        return parse_recipe(_read(Path(spec)), name=Path(spec).stem, file=spec)
    if spec in builtin_recipes():
        text = files("quantkit.recipes").joinpath(f"{spec}.yaml").read_text(encoding="utf-8")
        return parse_recipe(text, name=spec)
    near = nearest(spec, builtin_recipes())
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise QuantkitError(
        f"no recipe {spec!r}; {hint}built in: {', '.join(builtin_recipes())}; "
        "a file must end in .yaml"
    )


def pick_recipe(short: str, model_class: str) -> tuple[Recipe, str]:
    """The recipe that `--fp4` or `--fp8` means for a model class, and a line that says so.

    A recipe that declares the class and is a variant of the general one wins over it.
    """
    general = SHORT_NAMES[short]
    for name in builtin_recipes():
        recipe = load_recipe(name)
        if recipe.variant_of == general and model_class in recipe.model_classes:
            return recipe, f"--{short} picked {name}, the recipe declared for {model_class}"
    return load_recipe(general), f"--{short} picked {general}"


def describe_recipe(recipe: Recipe, picked: str, plan: Plan) -> dict[str, Any]:
    """The `recipe` entry of quantkit.json; a recipe file is pinned by the content it has now."""
    return {
        "name": recipe.name,
        "source": picked,
        "file": recipe.file,
        "content_key": content_key(Path(recipe.file)) if recipe.file else None,
        "unmatched_optional": list(plan.unmatched_optional),
    }


def parse_recipe(text: str, name: str, file: str | None = None) -> Recipe:
    """A Recipe from YAML text. `file` is what errors call it; default: the recipe's name."""
    where = file or f"recipe {name}"
    try:
        content = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise QuantkitError(f"{where}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        first_line = str(error).partition("\n")[0]
        raise QuantkitError(f"{where}: not valid YAML: {first_line}") from None
    if not isinstance(content, dict):
        raise QuantkitError(f"{where}: a recipe is a mapping with the key `rules`")
    try:
        return RecipeFile.model_validate(content).to_recipe(name, file)
    except ValidationError as error:
        raise QuantkitError(f"{where}: {explain(error)}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise QuantkitError(f"recipe file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise QuantkitError(f"recipe file {path} cannot be read: {error}") from None


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key written twice, which PyYAML would settle by silently taking the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            seen.add(str(key))
        return super().construct_mapping(node, deep)
