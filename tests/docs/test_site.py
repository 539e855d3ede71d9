"""The built site: its links, and that it fetches nothing from elsewhere."""

from pathlib import Path

import pytest

from tools.docs import site
from tools.docs.site import SiteError, make_self_contained


def test_worker_of_the_search_comes_from_the_site(tmp_path: Path) -> None:
    """Pages that are opened as files, on a machine without network, can be searched."""
    folder = tmp_path / "do"
    folder.mkdir()
    (folder / "run.html").write_text(
        '<script src="https://unpkg.com/iframe-worker/shim" type="text/javascript"></script>'
    )
    make_self_contained(tmp_path)
    assert 'src="../file_worker.js"' in (folder / "run.html").read_text()


def test_anything_else_from_elsewhere_is_an_error(tmp_path: Path) -> None:
    """A new version of the generator may fetch fonts. Links that people follow are allowed."""
    (tmp_path / "a.html").write_text('<a href="https://example.com">x</a>')
    make_self_contained(tmp_path)
    (tmp_path / "b.html").write_text('<link rel="stylesheet" href="https://fonts.example.com/x">')
    with pytest.raises(SiteError, match=r"b\.html would fetch something from fonts\.example\.com"):
        make_self_contained(tmp_path)


def test_links_to_files_that_are_no_pages_become_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links among pages of the repository's root and of docs/ stay links."""
    monkeypatch.setattr(site, "ROOT", tmp_path)
    monkeypatch.setattr(site, "DOCS", tmp_path / "docs")
    page, other, root = (
        tmp_path / "docs/do/a.md",
        tmp_path / "docs/fix/b.md",
        tmp_path / "SECURITY.md",
    )
    for path in (page, other, root, tmp_path / "bench" / "run.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    page.write_text(
        "[b](../fix/b.md#x) [s](../../SECURITY.md) [bench](../../bench/run.py) [w](https://a.b)"
    )
    assert site._with_site_links(page, {page, other, root}) == (
        "[b](../fix/b.md#x) [s](../project/SECURITY.md) bench (`bench/run.py`) [w](https://a.b)"
    )
