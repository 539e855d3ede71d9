"""The generated pages are current, links lead somewhere, and the site has every page."""

import re
from pathlib import Path

import pytest

from tools.docs.links import ROOT, anchors, dead_links, pages, slug
from tools.docs.site import DOCS, SiteError, navigation
from tools.reference import metrics, values
from tools.reference.__main__ import PAGES
from tools.reference.markdown import SOURCE, MissingEntry, compare

pytestmark = pytest.mark.slow
"""They read the whole source."""


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_is_current(name: str) -> None:
    """`make reference` writes it. A command, value or reason without a description is an error there."""
    assert (DOCS / name).read_text() == PAGES[name]()


def test_links_of_all_pages_lead_somewhere() -> None:
    """Files and headings exist."""
    assert [sentence for page in pages() for sentence in dead_links(page)] == []


def test_site_has_every_page() -> None:
    """Each section's index names its pages."""
    named = [page for _, section in navigation() for page in section]
    assert set(DOCS.rglob("*.md")) <= {*named, DOCS / "index.md"}


def test_section_without_index_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that no index names would not be in the site."""
    from tools.docs import site

    monkeypatch.setattr(site, "ROOT", tmp_path)
    (tmp_path / "index.md").write_text("# Index\n\n[a](a.md)\n")
    (tmp_path / "a.md").write_text("# A\n")
    assert [page.name for page in site.section_pages(tmp_path)] == ["index.md", "a.md"]
    (tmp_path / "b.md").write_text("# B\n")
    with pytest.raises(SiteError, match=r"does not name b\.md"):
        site.section_pages(tmp_path)


def test_dead_links_are_found() -> None:
    """The check of links is worth nothing if it finds none."""
    page = DOCS / "index.md"
    assert "a-new-one" in {slug("A `new` one!")}
    assert slug(re.sub("^# ", "", page.read_text().splitlines()[0])) in anchors(page)


def test_dead_link_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file and a missing heading have a sentence each; code is no link."""
    from tools.docs import links

    monkeypatch.setattr(links, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A\n\n[x](no.md) [y](#b) [z](#a) `[q](no.md)` [w](https://example.com)\n")
    assert list(dead_links(page)) == [
        "page.md: no.md: no such file",
        "page.md: #b: no such heading",
    ]


def test_metrics_are_read_from_every_module_that_makes_some() -> None:
    """A new program's metrics must be added to the page."""
    makers = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if re.search(r"\b(?:Gauge|Counter|Histogram)(?:MetricFamily)?\(\s*f?\"", file.read_text())
    }
    assert makers <= set(metrics.PROGRAMS.values())


def test_name_without_an_entry_is_an_error() -> None:
    """And so is an entry whose name is gone."""
    file = ROOT / "x.toml"
    with pytest.raises(MissingEntry, match=r"add an entry for b\n.*c is not in the source"):
        compare({"a", "b"}, {"a", "c"}, file)


def test_comments_of_values_belong_to_their_keys() -> None:
    """Comments above and behind count; one above a blank line does not."""
    found = values.read_comments("# Of a.\na:\n  # Of b.\n  b: 1\n  c: 2 # of c\n# lost\n\nd: 3\n")
    assert found == {"a": "Of a.", "a.b": "Of b.", "a.c": "of c"}
