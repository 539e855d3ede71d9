"""The pages of symptoms quote sentences that exist, and the index of sentences has all of them."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tools.reference.markdown import DOCS, ROOT, parsed
from tools.reference.messages import _shown, messages

pytestmark = pytest.mark.slow
"""They read the whole source."""

PAGES = sorted(set((DOCS / "fix").glob("*.md")) - {DOCS / "fix" / "messages.md"})

FOREIGN = re.compile(
    r"fenka why|kubectl|nvidia-smi|CUDA_|connection re|EOF|x509|malformed HTTP|server gave HTTP|secret \"|"
    r"SchedulingGated|UnexpectedAdmissionError|ImagePullBackOff|failed to create containerd task|"
    r"permission denied|/dev/|forbidden|violates PodSecurity|additional properties|unresolvable CDI|"
    r"PreStartContainer|ContainerCreating|Insufficient|--|NODE|fenka_|fenka-node-|cgpu=|free$|waits:|"
    r"nvidia\.com/|more than any|file too short|fenka \w+$"
)
"""Sentences of other programs, and names: the source does not have them."""


@cache
def texts() -> str:
    """Return all texts of the source, of the library and of the chart."""
    found = [
        node.value
        for nodes in parsed().values()
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    found += [file.read_text() for file in (ROOT / "native/shim").rglob("*.[ch]")]
    found += [file.read_text() for file in (ROOT / "deploy/chart").rglob("*.*") if file.is_file()]
    return "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_quoted_sentences_exist_in_the_source(page: Path) -> None:
    """The first column of a table has them, with `…` for what differs."""
    for row in re.findall(r"(?m)^\| (?!---)(.*?) \|", page.read_text()):
        for quoted in re.findall(r"`([^`]+)`", row):
            if not FOREIGN.search(quoted):
                parts = [part.strip(" :") for part in quoted.split("…") if part.strip(" :")]
                assert [part for part in parts if part not in texts()] == []


def test_index_has_every_sentence() -> None:
    """A reader finds the sentence that a command printed."""
    index = (DOCS / "fix" / "messages.md").read_text()
    missing = [
        message for message in messages() if " ".join(_shown(message.text).split()) not in index
    ]
    assert missing == []
    assert len(messages()) > 600
