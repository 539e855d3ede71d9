"""Man pages and shell completions: in an archive, and in `Release.share` for wheels and packages."""

import shutil
from pathlib import Path

from deploy.release.archive import files_below, write_archive
from deploy.release.man_pages import man_pages
from deploy.release.recipe import Release
from fenka.cli.command_tree import command_tree
from fenka.cli.completion_scripts import completions


def build_pages(release: Release) -> list[Path]:
    """Write the pages of all commands. They are laid out as below /usr/share."""
    tree = command_tree()
    shutil.rmtree(release.share, ignore_errors=True)
    pages = man_pages(tree, release.version, release.epoch)
    texts = {f"man/man1/{name}": text for name, text in pages.items()} | completions(tree)
    for name, text in texts.items():
        path = release.share / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    archive = release.into / f"fenka-{release.version}-share.tar.gz"
    write_archive(archive, files_below(release.share, "share/"), release.epoch)
    return [archive]
