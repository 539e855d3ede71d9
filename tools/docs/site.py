"""Builds the site of the documentation: `make docs` leaves it in dist/docs.

    python -m tools.docs.site [FOLDER]

The pages are those of docs/ and a few of the repository's root. A section's index.md names its pages in
their order. A page that no index names is an error, and so is a dead link. Links to files that are no pages
become plain text. The site fetches nothing from elsewhere, and its search works when the pages are opened
as files.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.docs.links import ROOT, dead_links, links

DOCS = ROOT / "docs"
HERE = Path(__file__).parent
SECTIONS = ("start", "do", "understand", "reference", "fix", "from", "measurements")
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "ARCHITECTURE.md")
"""Pages of the repository's root that the site has, below `project/`."""

TABLES = ".md-typeset table:not([class]) { display: table; font-size: .68rem; }\n"
_OUTSIDE = re.compile(r'<(?:script|link|img)\b[^>]*\b(?:src|href)="https?://([^/"]+)[^>]*>')


class SiteError(Exception):
    """The site cannot be built: a page is missing from its index, or a link is dead."""


def title(path: Path) -> str:
    """Return a page's first heading."""
    match = re.search(r"^# (.+)$", path.read_text(), re.MULTILINE)
    if not match:
        raise SiteError(f"{path.relative_to(ROOT)} has no heading")
    return match[1].replace("`", "")


def section_pages(folder: Path) -> list[Path]:
    """Return a section's pages in the order of its index. Raises SiteError if it lacks one."""
    index = folder / "index.md"
    if not index.exists():
        raise SiteError(f"{folder.relative_to(ROOT)} has no index.md")
    found = [index]
    for target in links(index.read_text()):
        page = (folder / target.partition("#")[0]).resolve()
        if page.suffix == ".md" and page.is_relative_to(folder) and page not in found:
            found.append(page)
    missing = sorted({*folder.rglob("*.md")} - {*found})
    if missing:
        names = ", ".join(str(page.relative_to(folder)) for page in missing)
        raise SiteError(f"{index.relative_to(ROOT)} does not name {names}")
    return found


def navigation() -> Iterator[tuple[str, list[Path]]]:
    """Yield the sections and their pages."""
    for name in SECTIONS:
        pages = section_pages(DOCS / name)
        yield title(pages[0]), pages
    yield "Project", [DOCS / "glossary.md", *(ROOT / name for name in ROOT_PAGES)]


def staged_name(page: Path) -> str:
    """Return a page's path within the site."""
    return str(page.relative_to(DOCS)) if page.is_relative_to(DOCS) else f"project/{page.name}"


def stage(target: Path) -> None:
    """Write the pages and the settings that the generator reads."""
    pages = target / "pages"
    shutil.copytree(DOCS, pages)
    sections = [*navigation()]
    known = {page for _, section in sections for page in section} | {DOCS / "index.md"}
    unknown = sorted({*DOCS.rglob("*.md")} - known)
    if unknown:
        raise SiteError(
            f"no section has {', '.join(str(page.relative_to(ROOT)) for page in unknown)}"
        )
    for page in known:
        path = pages / staged_name(page)
        path.parent.mkdir(exist_ok=True)
        path.write_text(_with_site_links(page, known))
    (pages / "stylesheets").mkdir()
    (pages / "stylesheets" / "tables.css").write_text(TABLES)
    shutil.copy(HERE / "file_worker.js", pages)
    nav = ["{ " + '"Home" = "index.md"' + " }"]
    for name, section in sections:
        entries = ", ".join(json.dumps(staged_name(page)) for page in section)
        nav.append("{ " + f"{json.dumps(name, ensure_ascii=False)} = [{entries}]" + " }")
    settings = (HERE / "site.toml").read_text()
    settings = settings.replace("[project]\n", f"[project]\nnav = [{', '.join(nav)}]\n", 1)
    (target / "zensical.toml").write_text(settings)


def _with_site_links(page: Path, known: set[Path]) -> str:
    """Return a page's text with links to pages of the site, and without those to other files."""

    def replace(match: re.Match[str]) -> str:
        text, target = match.groups()
        name, hash_sign, anchor = target.partition("#")
        if not name or re.match(r"[a-z]+:", target):
            return match[0]
        file = (page.parent / name).resolve()
        file = file / "index.md" if file.is_dir() and file / "index.md" in known else file
        here = Path(staged_name(page)).parent
        if file in known:
            return f"[{text}]({os.path.relpath(staged_name(file), here)}{hash_sign}{anchor})"
        if file.is_relative_to(DOCS) and file.is_file():
            return match[0]
        return text if "`" in text or "/" in text else f"{text} (`{file.relative_to(ROOT)}`)"

    return re.sub(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)", replace, page.read_text())


def make_self_contained(site: Path) -> None:
    """Replace the script that the generator fetches from elsewhere, and check that none is left."""
    for page in site.rglob("*.html"):
        worker = os.path.relpath(site / "file_worker.js", page.parent)
        text = re.sub(r"https://unpkg\.com/iframe-worker/shim", worker, page.read_text())
        page.write_text(text)
        if outside := _OUTSIDE.findall(text):
            raise SiteError(f"{page.name} would fetch something from {outside[0]}")


def build(target: Path) -> None:
    """Build the site in a folder. Raises SiteError if a page or a link is missing."""
    dead = [sentence for page in sorted(DOCS.rglob("*.md")) for sentence in dead_links(page)]
    if dead:
        raise SiteError("dead links:\n" + "\n".join(dead))
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder))
        command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict", "--clean"]
        if subprocess.run(command, cwd=folder, check=False).returncode:
            raise SiteError("zensical reports the faults above")
        site = Path(folder) / "site"
        make_self_contained(site)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(site, target)


if __name__ == "__main__":
    destination = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist" / "docs")
    try:
        build(destination)
    except SiteError as error:
        sys.exit(f"docs: {error}")
    print(f"{destination}: open index.html, or serve the folder by any web server")
