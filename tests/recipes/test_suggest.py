from __future__ import annotations

import pytest

from quantkit.recipes.rule import Match
from quantkit.recipes.suggest import explain_no_match, nearest, unmatched_globs

NAMES = ["language_model.lm_head", "language_model.layers.0.mlp.up_proj", "visual.proj_out"]


@pytest.mark.parametrize(
    ("glob", "said"),
    [
        ("lm_head", "write 'language_model.lm_head' or '*.lm_head'"),
        ("visual", "write 'visual.*' for everything below"),
        ("re:.*proj_out", "use `name_regex:`"),
        (
            r".*\.mlp\..*",
            "as a regular expression it matches 'language_model.layers.0.mlp.up_proj'",
        ),
        ("language_model.lm_hed", "did you mean 'language_model.lm_head'"),
        ("LANGUAGE_MODEL.LM_HEAD", "did you mean 'language_model.lm_head'"),
        ("zzz", "quantkit inspect MODEL --layers"),
        ("[", "quantkit inspect MODEL --layers"),
    ],
)
def test_a_glob_that_matches_nothing_is_answered_with_the_spelling_that_works(glob, said):
    """C11: prefixed name, parent module, regex instead of glob, typo, wrong case, nonsense."""
    assert said in explain_no_match(glob, NAMES)


def test_only_the_globs_without_any_match_are_reported():
    match = Match(names=("*.lm_head", "*.norm*", "visual.proj_out"))
    assert list(unmatched_globs(match, NAMES)) == ["*.norm*"]


def test_nearest_ignores_case_and_returns_the_original_spelling():
    assert nearest("NVFP", ["nvfp4", "fp8"]) == ["nvfp4"]
    assert nearest("xyzzy", ["nvfp4"]) == []
