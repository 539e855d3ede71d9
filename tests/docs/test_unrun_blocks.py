"""Blocks of the documentation that no test runs can be parsed, and name what exists."""

from pathlib import Path

import pytest

from tests.docs.test_pages import PAGES, ROOT
from tests.docs.test_pages import name as page_name
from tools.docs.blocks import read_page
from tools.docs.unrun_blocks import Chart, unrun_faults

CHART = Chart(ROOT)


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_blocks_that_are_not_run_name_what_exists(path: Path) -> None:
    """Two of them had the version of a chart that was never made."""
    assert list(unrun_faults(read_page(path), CHART)) == []


@pytest.mark.parametrize(
    ("language", "text", "fault"),
    [
        ("sh", "if true; then", "is no shell"),
        ("console", "$ echo 'a\nb", "is no shell"),
        ("yaml", "a: [", "is no yaml"),
        ("sh", "helm install fenka deploy/charts", "there is no deploy/charts"),
        ("sh", "helm push dist/fenka-0.0.1.tgz oci://r.example.com/charts", "version 0.0.1"),
        ("sh", "helm install fenka oci://r/charts/fenka --version 0.0.1", "version 0.0.1"),
        ("yaml", "chart: fenka\ntargetRevision: 0.0.1", "version 0.0.1"),
        ("yaml", "url: oci://r/charts/fenka\nref: {tag: 0.0.1}", "version 0.0.1"),
        ("sh", "helm upgrade fenka deploy/chart --set node.nosuch=1", "no value node.nosuch"),
    ],
)
def test_fault_is_found_when_a_block_is_not_run(
    tmp_path: Path, language: str, text: str, fault: str
) -> None:
    """A reader would find it otherwise."""
    page = tmp_path / "page.md"
    page.write_text(f"<!-- not run: no such thing -->\n# Page\n\n```{language}\n{text}\n```\n")
    (found,) = unrun_faults(read_page(page), CHART)
    assert fault in found


@pytest.mark.parametrize(
    "text",
    [
        "helm install fenka deploy/chart --set node.nodeSelector.pool=gpu",
        "helm install other repo/chart --version 9.9.9",
        "kubectl apply -f https://example.com/deploy/nosuch.yaml",
    ],
)
def test_block_is_accepted_when_its_names_are_the_readers(tmp_path: Path, text: str) -> None:
    """Other charts, addresses and keys of maps are not this repository's."""
    page = tmp_path / "page.md"
    page.write_text(f"<!-- not run: no such thing -->\n# Page\n\n```sh\n{text}\n```\n")
    assert list(unrun_faults(read_page(page), CHART)) == []
