"""Checks the documentation's blocks that no test runs: they can be parsed, and what they name exists.

A file of this repository, the chart's version and its values are looked up. Names of a reader's own, such as
an address of a registry, are not.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tools.docs.blocks import COMMAND_LANGUAGES, READERS, Block, Page, steps

_PATH = re.compile(r"(?<![\w./:-])(?:bench|deploy|docs|e2e|native|src|tools|vm)/[\w./-]*\w")
"""A path below a folder of this repository."""

_PROMPT = re.compile(r"^[a-z][\w-]*[$#] |^# (?=\w)", re.MULTILINE)
_PACKAGED = re.compile(r"\bfenka-(\d+\.\d+\.\d+)\.tgz\b")
_NAMES_CHART = re.compile(r"\bcharts/fenka\b|\bchart: fenka\b")
_VERSION = re.compile(r"(?:--version[ =]|targetRevision: |\btag: )\"?(\d+\.\d+\.\d+)\b")
_SETTING = re.compile(r"--set(?:-json|-string|-file)?[ =]['\"]?([\w.-]+)=")


class Chart:
    """The chart of this repository: its version and its values."""

    def __init__(self, root: Path) -> None:
        """Args: root: of the repository."""
        self.root = root
        folder = root / "deploy" / "chart"
        self.version: str = yaml.safe_load((folder / "Chart.yaml").read_text())["version"]
        self._values: Mapping[str, Any] = yaml.safe_load((folder / "values.yaml").read_text())

    def has(self, name: str) -> bool:
        """Return whether the chart has a value of this name. Below an empty value any name is the user's."""
        known: Any = self._values
        for part in name.split("."):
            if not isinstance(known, Mapping) or not known:
                return True
            if part not in known:
                return False
            known = known[part]
        return True


def unrun_faults(page: Page, chart: Chart) -> Iterator[str]:
    """Yield what is wrong with blocks of the page that are not run."""
    for block in page.blocks:
        if page.place(block):
            continue
        place = f"{page.path}:{block.line}"
        yield from (f"{place}: {fault}" for fault in _unreadable(block))
        yield from (f"{place}: {fault}" for fault in _missing(block.text, chart))


def _unreadable(block: Block) -> Iterator[str]:
    if block.language in COMMAND_LANGUAGES:
        # A block for several users has their names before its prompts; root's prompt is a comment in sh.
        text = _PROMPT.sub("$ ", block.text) if block.language == "console" else block.text
        script = "\n".join(step.command for step in steps(text))
        read = subprocess.run(
            ["bash", "-n"], input=script, capture_output=True, text=True, check=False
        )
        if read.returncode:
            yield f"the block is no shell: {read.stderr.strip()}"
    elif reader := READERS.get(block.language):
        try:
            reader(block.text)
        except (ValueError, SyntaxError, yaml.YAMLError) as error:
            yield f"the block is no {block.language}: {error}"


def _missing(text: str, chart: Chart) -> Iterator[str]:
    for path in _PATH.findall(text):
        if not (chart.root / path).exists():
            yield f"there is no {path}"
    named = set(_PACKAGED.findall(text))
    if _NAMES_CHART.search(text):
        named |= set(_VERSION.findall(text))
    for version in sorted(named - {chart.version}):
        yield f"there is no chart of version {version}: it is {chart.version}"
    if "fenka" in text and "helm" in text:
        for name in _SETTING.findall(text):
            if not chart.has(name):
                yield f"the chart has no value {name}"
