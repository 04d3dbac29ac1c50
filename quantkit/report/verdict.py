"""The headline: what was proven, what was not, and what failed, in that order of bad news first.

A layer counts as realised only when the audit says `ok`. The number it is compared with is what
the plan asked for, not what the audit happened to find, so a layer that vanished from the engine
counts against it (C26: an "FP4 engine" that runs in BF16 must not look like a success).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath

from quantkit.manifest import model_key
from quantkit.report.blocks import Note, Tone, Verdict
from quantkit.report.documents import (
    Documents,
    Json,
    get,
    items,
    least,
    number,
    runs,
    text,
    words,
    worst,
)
from quantkit.report.words import counted, error, fixed, listed, short_format, size

# A file this much larger than its plan holds something twice, or weights that were folded back.
SIZE_TOLERANCE = 1.5

LABELS: dict[Tone, str] = {
    "bad": "Failed",
    "warn": "Look closer",
    "good": "Passed",
    "muted": "Not proven yet",
}


def verdict(documents: Documents) -> Verdict:
    """The worst line as the headline, then everything else that was found."""
    lines = [
        *_engine(documents),
        *_verification(documents),
        *_lint(documents),
        *_sizes(documents),
        *_cost(documents),
    ]
    tones = [line.tone for line in lines]
    tone: Tone = next((t for t in ("bad", "warn", "good") if t in tones), "muted")
    if tone == "good" and documents.verify is None:
        tone = "muted"
    if not any(tones):
        made = counted(len(documents.asked), "layer")
        claim = f"{made} quantized; neither the graph nor an engine was checked."
        return Verdict("muted", LABELS["muted"], claim, tuple(lines))
    first = next((line for line in lines if line.tone == tone), lines[0])
    rest = tuple(line for line in lines if line is not first)
    return Verdict(tone, LABELS[tone], first.text, rest)


def realised(documents: Documents) -> tuple[list[str], list[str]]:
    """Names of the layers asked for, and of those the engine runs as asked."""
    layers = items(documents.audit, "layers")
    asked = dict.fromkeys([*documents.asked, *(text(row, "layer") or "?" for row in layers)])
    # A layer may stand in several rows (several profiles); one bad row spoils it.
    ok = {text(row, "layer") for row in layers if row.get("status") == "ok"}
    ok -= {text(row, "layer") for row in layers if row.get("status") != "ok"}
    return list(asked), [name for name in asked if name in ok]


def _engine(documents: Documents) -> Iterator[Note]:
    audit = documents.audit
    if audit is None:
        return
    if get(audit, "understood") is not True:
        why = f" ({problem})" if (problem := text(audit, "problem")) else ""
        yield Note(f"The engine could not be read, so what it runs is unknown{why}.", "bad")
        return
    layers = items(audit, "layers")
    asked, ok = realised(documents)
    formats = Counter(
        short_format(documents.asked.get(name) or _asked(layers, name)) for name in asked
    )
    what = (
        next(iter(formats))
        if len(formats) == 1
        else (" and ".join(f"{name} ({n})" for name, n in formats.items()) or "low precision")
    )
    claim = f"{len(ok)} of {counted(len(asked), 'layer')} asked for {what}"
    engine = text(audit, "engine") or "the engine"
    if asked and len(ok) == len(asked):
        kinds = " and ".join(sorted({_kernel(row) for row in layers}))
        yield Note(f"{claim} run as {kinds} in {engine}.", "good")
    else:
        yield from _shortfall(documents, claim, engine, asked, ok)
    built = text(documents.build, "engine")
    if built is not None and PurePath(built).name != PurePath(engine).name:
        yield Note(f"The audit is of {engine}, the last build made {built}: audit again.", "warn")


def _kernel(row: Json) -> str:
    """What a layer runs as, in words: `fp4 x fp4 GEMMs`."""
    asked = text(row, "asked") or ""
    if asked.endswith("-weight-only"):
        return f"GEMMs that read {short_format(asked)} weights"
    operands = [operand.partition("_")[0] for operand in words(row, "operands")]
    return f"{' x '.join(operands)} GEMMs" if operands else text(row, "realised") or "asked"


def _shortfall(
    documents: Documents, claim: str, engine: str, asked: list[str], ok: list[str]
) -> Iterator[Note]:
    rows = {
        text(row, "layer"): row
        for row in items(documents.audit, "layers")
        if row.get("status") != "ok"
    }
    by_status: dict[str, list[str]] = {}
    for name in asked:
        if name not in ok:
            status = text(rows[name], "status") or "unknown" if name in rows else "missing"
            by_status.setdefault(status, []).append(name)
    said = {
        "mismatch": "run in another precision",
        "emulated": "emulated in a higher precision: a smaller file, not a faster engine",
        "unknown": "run in a precision that the audit could not tell",
        "missing": "not found in the engine",
    }
    detail = "; ".join(
        f"{len(names)} {said.get(status, status)} ({listed(names)})"
        for status, names in by_status.items()
    )
    if not asked:
        yield Note(f"The audit of {engine} lists no layer.", "bad")
        return
    only_emulated = set(by_status) == {"emulated"}
    yield Note(f"{claim} run as asked in {engine}; {detail}.", "warn" if only_emulated else "bad")


def _asked(layers: list[Json], name: str) -> str:
    return next((text(row, "asked") or "?" for row in layers if text(row, "layer") == name), "?")


def _verification(documents: Documents) -> Iterator[Note]:
    verify = documents.verify
    if verify is None:
        return
    if (key := text(verify, "content_key")) and key != model_key(documents.folder):
        yield Note(
            "The model changed after it was verified: what was proven is not this model. Verify "
            "it again.",
            "bad",
        )
        return
    compared = list(runs(documents))
    shapes = counted(len({str(get(run, "shapes")) for run, _ in compared}), "input shape")
    # Where inputs are quantized a difference may be flipped codes; without, it is an error.
    floating = [o for run, o in compared if get(run, "input_quantizers") is False]
    outputs = floating or [output for _, output in compared]
    largest = error(worst([number(output, "relative_l2") for output in outputs]))
    passed = get(verify, "passed")
    if passed not in (True, False):
        yield Note("The verification did not record whether it passed.", "bad")
    elif not compared:
        yield Note("The verification recorded no comparison, so it proves nothing.", "bad")
    elif passed:
        yield Note(
            f"Verified: the exported graph computes what the fake-quantized model does, to "
            f"{largest} relative L2 over {shapes}{_layers_agree(verify)}"
            f"{_flips(verify, compared)}.",
            "good",
        )
    else:
        failed = [text(o, "name") or "?" for _, o in compared if get(o, "passed") is not True]
        where = f" in {listed(list(dict.fromkeys(failed)))}" if failed else ""
        largest = error(worst([number(output, "relative_l2") for _, output in compared]))
        yield Note(
            f"Verification failed{where}: the exported graph differs from the fake-quantized "
            f"model by up to {largest} relative L2 over {shapes}.",
            "bad",
        )
    checked, same = number(verify, "weights", "checked"), number(verify, "weights", "identical")
    if checked is not None and same is not None and same != checked:
        yield Note(f"{checked - same:.0f} of {checked:.0f} weights differ from the plan's.", "bad")
    elif get(verify, "weights", "identical") is False:
        yield Note("Weights read back from the file differ from the plan's.", "bad")


def _layers_agree(verify: Json) -> str:
    checked, largest = (
        number(verify, "layers", "checked"),
        number(verify, "layers", "worst_relative_l2"),
    )
    if checked is None or largest is None:
        return ""
    return f"; {counted(round(checked), 'layer')} fed identical inputs agree to {error(largest)}"


def _flips(verify: Json, compared: list[tuple[Json, Json]]) -> str:
    """What is left when inputs are quantized too: codes next to a rounding tie."""
    quantized = [o for run, o in compared if get(run, "input_quantizers") is True]
    flipped, codes = number(verify, "layers", "flipped_codes"), number(verify, "layers", "codes")
    if not quantized or not flipped or not codes:
        return ""
    largest = error(worst([number(output, "relative_l2") for output in quantized]))
    return (
        f"; with quantized inputs, where {flipped / codes:.2%} of the codes differ (values at "
        f"rounding ties and what follows from them), to {largest}"
    )


def _lint(documents: Documents) -> Iterator[Note]:
    errors = [f for f in items(documents.lint, "findings") if text(f, "severity") == "error"]
    if errors:
        rules = list(dict.fromkeys(text(f, "rule") or "?" for f in errors))
        yield Note(f"Lint found {counted(len(errors), 'error')}: {listed(rules)}.", "bad")


def _sizes(documents: Documents) -> Iterator[Note]:
    before = number(documents.manifest, "coverage", "bytes_before")
    after = number(documents.manifest, "coverage", "bytes_after")
    if before and after is not None:
        rows = [r for r in items(documents.manifest, "plan") if r.get("weight_format")]
        parts = [sum(number(r, f"bytes_{when}") or 0 for r in rows) for when in ("before", "after")]
        yield Note(
            f"Weights {size(before)} to {size(after)} ({after / before:.0%}); the quantized layers "
            f"among them {size(parts[0])} to {size(parts[1])}."
        )
    written = [number(f, "bytes") or 0 for f in items(documents.manifest, "export", "files")]
    # Slack for what is not in the plan: graph, names, biases; in an engine also its kernels.
    for what, actual, slack in (
        ("files take", sum(written), 1e6),
        ("engine takes", number(documents.build, "bytes"), 8e6),
    ):
        if actual and after is not None and actual > SIZE_TOLERANCE * after + slack:
            yield Note(
                f"The {what} {size(actual)} where the plan has {size(after)} of weights: "
                "something is stored twice or was folded back to high precision.",
                "warn",
            )


def _cost(documents: Documents) -> Iterator[Note]:
    outputs = items(documents.verify, "cost", "outputs")
    cosine = least([number(output, "cosine") for output in outputs])
    distance = worst([number(output, "relative_l2") for output in outputs])
    if cosine is not None or distance is not None:
        which = f" (worst of {len(outputs)} outputs)" if len(outputs) > 1 else ""
        yield Note(
            f"Cost of quantization: output cosine {fixed(cosine, 4)}, relative L2 "
            f"{error(distance)} against the unquantized model{which}."
        )
