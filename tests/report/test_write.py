from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

from quantkit.errors import QuantkitError
from quantkit.report import write_report
from quantkit.report.blocks import Cell
from quantkit.report.write import markdown_cell, markdown_text
from tests.report import checkpoints

VOID = {"meta", "wbr", "input", "rect", "br", "link"}


class Structure(HTMLParser):
    """Checks nesting and gathers ids, links, tables and outside references."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append((tag, given))
        if "id" in given:
            self.ids.append(given["id"] or "")
        if tag == "a":
            self.links.append(given["href"] or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def pages(artefact, tmp_path):
    def render(*folders):
        html, markdown = write_report(list(folders) or [artefact()], tmp_path / "report")
        return html.read_text(encoding="utf-8"), markdown.read_text(encoding="utf-8")

    return render


def test_the_page_is_well_formed_and_its_links_arrive(pages):
    html, _ = pages()
    page = Structure(html)
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)


def test_the_page_needs_no_other_file(pages):
    html, _ = pages()
    for _, given in Structure(html).tags:
        assert "src" not in given
        assert given.get("href", "#").startswith("#")
    assert "url(" not in html
    assert "@import" not in html


def test_tables_have_captions_and_scopes(pages):
    html, _ = pages()
    tags = Structure(html).tags
    assert sum(tag == "table" for tag, _ in tags) == sum(tag == "caption" for tag, _ in tags) > 5
    assert all(given.get("scope") in ("col", "row") for tag, given in tags if tag == "th")


def test_a_failure_is_a_red_banner_that_says_seven_of_ten(pages, artefact, made):
    """C26."""
    manifest = made["quantkit"]()
    manifest["plan"] = manifest["plan"][:13]
    folder = artefact(quantkit=manifest, audit=made["audit"](3, made["layers"][:10]))
    html, markdown = pages(folder)
    banner = re.search(
        r'<div class="verdict bad" role="alert">\s*<p class="headline">(.*?)</p>', html
    )
    assert banner is not None
    assert "<strong>Failed.</strong> 7 of 10 layers asked for NVFP4" in banner.group(1)
    assert "**Failed: 7 of 10 layers asked for NVFP4" in markdown


def test_names_from_a_model_cannot_become_markup(pages, artefact, made):
    manifest, lint = made["quantkit"](), made["lint"]()
    evil = '<script>alert("1")</script>|`x`'
    manifest["plan"].append(made["row"](evil, None, reason=evil))
    manifest["model"]["spec"] = evil
    lint["findings"][0]["message"] = evil
    html, markdown = pages(artefact(quantkit=manifest, lint=lint))
    assert html.count("<script>") == 1
    Structure(html)
    rendered = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)
    assert "<script>" not in rendered


def test_the_markdown_tables_have_as_many_cells_as_columns(pages, artefact, made):
    manifest = made["quantkit"]()
    manifest["plan"].append(made["row"]("a|b", None, reason="c|d\nnext line"))
    _, markdown = pages(artefact(quantkit=manifest))
    rendered = MarkdownIt("commonmark").enable("table").render(markdown)
    tables = re.findall(r"<table>.*?</table>", rendered, re.S)
    assert len(tables) == 9
    for table in tables:
        columns = len(re.findall("<th[ >]", table))
        assert all(row.count("<td") in (0, columns) for row in table.split("<tr>")[1:])
    assert "a|b" in rendered
    assert "c|d next line" in rendered


def test_both_pages_hold_every_layer_and_reason(pages, made):
    html, markdown = pages()
    plain = html.replace("<wbr>", "")
    for row in made["quantkit"]()["plan"]:
        assert row["layer"] in plain
        assert row["layer"] in markdown
        assert row["reason"] in plain


def test_several_folders_are_compared_first_and_their_sections_do_not_clash(pages, artefact):
    html, markdown = pages(artefact("one"), artefact("two", audit=None, build=None, verify=None))
    page = Structure(html)
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert html.index("The artefacts side by side") < html.index("What was done")
    assert "36 of 36" in markdown.partition("## What was done")[0]
    assert "Not proven yet" in markdown.partition("## What was done")[0]


def test_the_same_folder_gives_the_same_bytes(artefact, tmp_path):
    folder = artefact()
    first, second = (write_report([folder], tmp_path / name) for name in ("a", "b"))
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes()


def test_bad_input_is_one_line(artefact, tmp_path):
    with pytest.raises(QuantkitError, match="name at least one artefact folder"):
        write_report([], tmp_path)
    with pytest.raises(QuantkitError, match=r"has no quantkit\.json"):
        write_report([tmp_path / "absent"], tmp_path)
    folder = artefact()
    with pytest.raises(QuantkitError, match="is a file; name a folder"):
        write_report([folder], folder / "quantkit.json")
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    with pytest.raises(QuantkitError, match=r"cannot write .*report\.html"):
        write_report([folder], tmp_path / "out")


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        (Cell("fc.0", code=True), "`fc.0`"),
        (Cell("a`b", code=True), "a\\`b"),
        (Cell("a|b", code=True), "a\\|b"),
        (Cell("failed", "bad"), "**failed**"),
        (Cell("", code=True), ""),
    ],
)
def test_markdown_cells_survive_any_name(cell, shown):
    assert markdown_cell(cell) == shown


def test_markdown_text_is_one_line_without_markup():
    assert markdown_text("a_b *c*\n<d>") == "a\\_b \\*c\\* \\<d\\>"


def test_folders_of_different_kinds_are_compared_in_what_they_have(pages, artefact, tmp_path):
    graph = artefact("graph")
    checkpoint = checkpoints.write(tmp_path / "a", checkpoints.manifest(), checkpoints.verify())
    repack = checkpoints.write(
        tmp_path / "b",
        checkpoints.manifest("torchao"),
        checkpoints.verify(weight_error={"relative_l2": None, "rows": []}),
    )
    html, markdown = pages(graph, checkpoint, repack)
    page = Structure(html)
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    front = markdown.partition("# all-MiniLM")[0]
    rows = [line.split("|")[1:-1] for line in front.splitlines() if line.startswith("|")]
    cells = [[cell.strip(" `*") for cell in row] for row in rows]
    assert cells[0] == [
        *("Folder", "Holds", "Verdict", "Recipe", "Weights", "Weight error"),
        *("Cosine", "Relative L2", "Layers realised"),
    ]
    assert [row[1:3] + row[5:] for row in cells[2:]] == [
        ["ONNX model", "Passed", "-", "0.9531", "0.31", "36 of 36"],
        ["modelopt checkpoint", "Passed", "0.095", "-", "-", "-"],
        ["modelopt checkpoint", "Passed", "not measured", "-", "-", "-"],
    ]


def test_checkpoints_alone_are_compared_without_what_graphs_have(pages, tmp_path):
    folders = [
        checkpoints.write(tmp_path / name, checkpoints.manifest(), checkpoints.verify())
        for name in ("a", "b")
    ]
    _, markdown = pages(*folders)
    assert "Cosine" not in markdown
    assert "realised" not in markdown


def test_the_page_of_a_checkpoint_is_well_formed(pages, tmp_path):
    failed = checkpoints.verify(**checkpoints.FAILED)
    html, markdown = pages(checkpoints.write(tmp_path / "a", checkpoints.manifest(), failed))
    page = Structure(html)
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert '<div class="verdict bad" role="alert">' in html
    assert "<h1>llama as modelopt checkpoint</h1>" in html
    rendered = MarkdownIt("commonmark").enable("table").render(markdown)
    for found in re.findall(r"<table>.*?</table>", rendered, re.S):
        columns = len(re.findall("<th[ >]", found))
        assert all(row.count("<td") in (0, columns) for row in found.split("<tr>")[1:])
