"""The headline of a checkpoint: whether the files were proven to be what the plan makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from quantkit.manifest import model_key
from quantkit.models.lora.survival import LOW_SHARE
from quantkit.report.blocks import Note, Tone, Verdict
from quantkit.report.checkpoint import lora_totals
from quantkit.report.documents import Documents, get, items, number, text
from quantkit.report.verdict import LABELS, SIZE_TOLERANCE
from quantkit.report.words import counted, error, fixed, input_name, listed, short_format, size

# A weight that decodes to something further away is wrong or was lost to a neighbour's scale.
FAR_OFF = 0.5


def checkpoint_verdict(documents: Documents) -> Verdict:
    """The worst line as the headline, then everything else that was found."""
    lines = [
        *_verified(documents),
        *_problems(documents),
        *_sizes(documents),
        *_error(documents),
        *_loras(documents),
        *_stays(documents),
    ]
    tones = [line.tone for line in lines]
    tone: Tone = next((t for t in ("bad", "warn", "good") if t in tones), "muted")
    if documents.verify is None:
        claim = f"{_what(documents)}; nothing compared the files with the model."
        return Verdict("muted", LABELS["muted"], claim, tuple(lines))
    first = next((line for line in lines if line.tone == tone), lines[0])
    rest = tuple(line for line in lines if line is not first)
    return Verdict(tone, LABELS[tone], first.text, rest)


def _what(documents: Documents) -> str:
    """`112 layers, NVFP4 with NVFP4 inputs`."""
    formats: Counter[str] = Counter()
    for row in items(documents.manifest, "plan"):
        weight, given = text(row, "weight_format"), text(row, "input_format")
        if weight is not None:
            entry = f"{input_name(given)} inputs" if given else "inputs as they are"
            formats[f"{short_format(weight)} with {entry}"] += 1
    total = counted(sum(formats.values()), "layer")
    if len(formats) == 1:
        return f"{total}, {next(iter(formats))}"
    return f"{total}: " + ", ".join(f"{times} {name}" for name, times in formats.most_common())


def _verified(documents: Documents) -> Iterator[Note]:
    verify = documents.verify
    if verify is None:
        return
    if (key := text(verify, "content_key")) and key != model_key(documents.folder):
        yield Note(
            "The files changed after they were verified: what was proven is not this checkpoint. "
            "Verify it again.",
            "bad",
        )
        return
    checked, same = number(verify, "weights", "checked"), number(verify, "weights", "identical")
    kept, kept_same = number(verify, "kept", "checked"), number(verify, "kept", "identical")
    passed = get(verify, "passed")
    differences = items(verify, "differences")
    if passed not in (True, False):
        yield Note("The verification did not record whether it passed.", "bad")
    elif None in (checked, same, kept, kept_same) or (passed and not checked):
        yield Note("The verification recorded no comparison, so it proves nothing.", "bad")
    elif passed and not differences and (checked, kept) == (same, kept_same):
        model = Path(text(verify, "source", "spec") or "the model").name
        made = "those of" if documents.is_repack else "what the plan makes of"
        yield Note(
            f"Verified: {_what(documents)}, read back from the files, are {made} {model}, bit for "
            f"bit, and {kept:,.0f} other tensors are identical.",
            "good",
        )
    else:
        rows = [f"{text(row, 'name')} ({text(row, 'what')})" for row in differences]
        where = f": {listed(rows)}" if rows else ""
        yield Note(
            f"Verification failed: the files are not what the plan makes of the model{where}.",
            "bad",
        )


def _problems(documents: Documents) -> Iterator[Note]:
    rows = [r for r in items(documents.verify, "problems") if text(r, "severity") == "error"]
    if rows:
        names = list(dict.fromkeys(text(row, "name") or "?" for row in rows))
        yield Note(
            f"{counted(len(rows), 'problem')} that some program fails on, or computes wrong "
            f"numbers: {listed(names)}.",
            "bad",
        )


def _sizes(documents: Documents) -> Iterator[Note]:
    before = number(documents.manifest, "coverage", "bytes_before")
    after = number(documents.manifest, "coverage", "bytes_after")
    written = sum(number(f, "bytes") or 0 for f in items(documents.manifest, "export", "files"))
    if documents.is_repack:
        yield Note(f"Files of {size(written)}; repacked, nothing was rounded again.")
    elif before and after is not None:
        yield Note(f"Weights {size(before)} to {size(after)} ({after / before:.0%}).")
    # Slack for what is not in the plan: headers, biases, vocabularies.
    if after is not None and written > SIZE_TOLERANCE * after + 32e6:
        yield Note(
            f"The files take {size(written)} where the plan has {size(after)} of weights: "
            "something is stored twice.",
            "warn",
        )


def _error(documents: Documents) -> Iterator[Note]:
    rows = items(documents.verify, "weight_error", "rows")
    total = number(documents.verify, "weight_error", "relative_l2")
    if not rows:
        return
    far = [row for row in rows if (number(row, "relative_l2") or 0) > FAR_OFF]
    if far:
        names = [text(row, "layer") or "?" for row in far]
        yield Note(
            f"{counted(len(far), 'layer')} {'is' if len(far) == 1 else 'are'} far from the "
            f"original once decoded: {listed(names)}.",
            "warn",
        )
    worst = max(rows, key=lambda row: number(row, "relative_l2") or 0)
    yield Note(
        f"Quantized weights are {error(total)} away from the original (relative L2), the worst "
        f"layer {error(number(worst, 'relative_l2'))} ({text(worst, 'layer')})."
    )


def _loras(documents: Documents) -> Iterator[Note]:
    for name, (share, ratio, _) in lora_totals(documents).items():
        if share is None:
            continue
        times = "" if ratio is None else f", {error(ratio)} times what rounding changes"
        yield Note(
            f"LoRA {name}: {fixed(share, 2)} of its delta is left{times}.",
            "warn" if share < LOW_SHARE else "",
        )


def _stays(documents: Documents) -> Iterator[Note]:
    kept = [row for row in items(documents.manifest, "plan") if not row.get("weight_format")]
    share = number(documents.manifest, "coverage", "quantized_bytes_share")
    if kept and share is not None and not documents.is_repack:
        yield Note(
            f"{share:.0%} of the weight bytes are quantized; "
            f"{counted(len(kept), 'weight')} stay in high precision, each with its reason below."
        )
