"""From artefact folders to report.html and report.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup

from quantkit.errors import QuantkitError
from quantkit.report.blocks import Cell, Column, Page, Table
from quantkit.report.cells import MISSING, measured
from quantkit.report.checkpoint import checkpoint_sections
from quantkit.report.checkpoint_verdict import checkpoint_verdict
from quantkit.report.documents import Documents, items, least, number, read_documents, text, worst
from quantkit.report.sections import sections
from quantkit.report.verdict import realised, verdict
from quantkit.report.words import error, fixed, size

# A measurement that this kind of artefact does not have.
NOT_OF_THIS = Cell("-", "muted")


def write_report(folders: Sequence[Path], output: Path) -> tuple[Path, Path]:
    """Write report.html and report.md into the folder `output`; both paths are returned.

    folders: artefact folders (each with a quantkit.json), one page per folder in the order given,
    a comparison in front when there are several. The HTML file needs no other file.

    Raises QuantkitError when a folder has no manifest, a file in it is not JSON, or `output` is a
    file or cannot be written.
    """
    if not folders:
        raise QuantkitError("nothing to report: name at least one artefact folder")
    documents = [read_documents(folder) for folder in folders]
    pages = [_page(each) for each in documents]
    comparison = _comparison(documents) if len(documents) > 1 else None
    if output.is_file():
        raise QuantkitError(f"output {output} is a file; name a folder")
    written = (output / "report.html", output / "report.md")
    for path, template in zip(written, ("page.html.j2", "page.md.j2"), strict=True):
        rendered = _environment().get_template(template).render(pages=pages, comparison=comparison)
        try:
            output.mkdir(parents=True, exist_ok=True)
            path.write_text(rendered, encoding="utf-8")
        except OSError as problem:
            raise QuantkitError(f"cannot write {path}: {problem.strerror}") from None
    return written


def _page(documents: Documents) -> Page:
    manifest = documents.manifest
    model = text(manifest, "model", "spec") or "a model that was not recorded"
    if documents.checkpoint_target is not None:
        return Page(
            title=f"{Path(model).name} as {documents.checkpoint_target} checkpoint",
            subtitle=str(documents.folder),
            verdict=checkpoint_verdict(documents),
            sections=checkpoint_sections(documents),
        )
    recipe = text(manifest, "recipe", "name") or "a recipe that was not recorded"
    return Page(
        title=f"{Path(model).name} with {recipe}",
        subtitle=str(documents.folder),
        verdict=verdict(documents),
        sections=sections(documents),
    )


def _comparison(documents: Sequence[Documents]) -> Table:
    """What can be said of all kinds of folders, then what can be said of the kinds there are."""
    kinds = {each.checkpoint_target is not None for each in documents}
    columns = [Column("Folder"), Column("Holds"), Column("Verdict"), Column("Recipe")]
    columns += [Column("Weights", True)]
    columns += [Column("Weight error", True)] if True in kinds else []
    if False in kinds:
        columns += [Column("Cosine", True), Column("Relative L2", True)]
        columns += [Column("Layers realised", True)]
    rows = []
    for each in documents:
        target = each.checkpoint_target
        found = verdict(each) if target is None else checkpoint_verdict(each)
        after = number(each.manifest, "coverage", "bytes_after")
        cells = [
            Cell(str(each.folder), code=True),
            Cell("ONNX model" if target is None else f"{target} checkpoint"),
            Cell(found.label, found.tone),
            Cell(text(each.manifest, "recipe", "name") or "not recorded"),
            measured(after, size(after)),
        ]
        if True in kinds:
            cells.append(NOT_OF_THIS if target is None else _weight_error(each))
        if False in kinds:
            cells += _graph_cells(each) if target is None else [NOT_OF_THIS] * 3
        rows.append(tuple(cells))
    return Table("The artefacts side by side", tuple(columns), tuple(rows))


def _weight_error(documents: Documents) -> Cell:
    total = number(documents.verify, "weight_error", "relative_l2")
    return Cell("not measured", "muted") if total is None else measured(total, error(total))


def _graph_cells(documents: Documents) -> list[Cell]:
    """Cosine, relative L2 and layers realised of a folder with a graph."""
    cost = items(documents.verify, "cost", "outputs")
    cosine = least([number(output, "cosine") for output in cost])
    distance = worst([number(output, "relative_l2") for output in cost])
    asked, ok = realised(documents)
    return [
        measured(cosine, fixed(cosine, 4)),
        measured(distance, error(distance)),
        Cell(f"{len(ok)} of {len(asked)}") if documents.audit is not None else MISSING,
    ]


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["breakable"] = breakable
    environment.filters["md"] = markdown_text
    environment.filters["mdcell"] = markdown_cell
    return environment


def _template(name: str) -> str:
    return files("quantkit.report").joinpath(name).read_text(encoding="utf-8")


def breakable(name: str) -> Markup:
    """A dotted name, escaped, that may break after its dots and nowhere else."""
    return Markup(".<wbr>").join(name.split("."))


def markdown_text(value: str) -> str:
    """Text in which no character means anything to Markdown or HTML, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", " ".join(value.split()))


def markdown_cell(cell: Cell) -> str:
    """A cell of a Markdown table. Code with a backtick or a pipe in it is set as plain text."""
    if cell.code and cell.text and not re.search(r"[`|\n]", cell.text):
        return f"`{cell.text}`"
    shown = markdown_text(cell.text)
    return f"**{shown}**" if cell.tone == "bad" else shown
