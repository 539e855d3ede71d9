"""Runs the code blocks of the documentation as a reader would type them.

HTML comments, which readers do not see, say what is to be done with a block. At the top of a page, or
directly before a block:

    <!-- run: workstation -->       Run the commands where a fenka daemon has simulated cards.
    <!-- run: cluster -->           Run the commands where kubectl reaches a cluster with fenka.
    <!-- run: scenario -->          e2e/scenarios/test_guide.py runs them with those of other pages.
    <!-- not run: REASON -->        Do not run them, because no test can.

Options follow the place:

    cards=A100-40G*2                The simulated cards of a workstation. Default: T4.
    daemon=no                       No daemon runs on the workstation; the page starts it.
    fenka=no                        Fenka is not installed on the cluster; the page installs it.
    share=no                        No node shares its cards; the page labels one.
    jobset                          The cluster has JobSet.
    full                            The page is left to the second tier (FENKA_E2E_TIER=full).

Only directly before a block:

    <!-- fails -->                  A command of this block ends with an exit code other than 0.
    <!-- file: NAME -->             Write the block to this file of the session's directory.
    <!-- apply -->                  Apply the block to the cluster.

Anywhere between blocks:

    <!-- check: COMMAND -->         Run a command that the reader does not see. It must succeed. A place that
                                    is written above it, for the block that follows, holds for both.

Blocks of `sh` and `console` have commands. If a line begins with `$ `, the other lines are expected output.
There `…` stands for any text in a line, and a line with nothing else for any lines. The number of spaces, the
length of rules and the figures of durations do not count. On a cluster NODE and `gpu-1` stand for a node's
name, and IMAGE for that of an image with Python. Blocks of `yaml`, `toml`, `json` and `python` that are not
run must at least be readable.
"""

import ast
import contextlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeGuard

import yaml

COMMAND_LANGUAGES = {"sh", "bash", "console"}
READERS: dict[str, Callable[[str], object]] = {
    "yaml": lambda text: list(yaml.safe_load_all(text)),
    "toml": tomllib.loads,
    "json": json.loads,
    "python": ast.parse,
}
"""How to check a block that is not run, by its language."""

PLACES = {"workstation", "cluster", "scenario"}
OPTIONS = {"cards", "daemon", "fenka", "full", "jobset", "share"}

_COMMENT = re.compile(r"<!--\s*(run|not run|fails|file|apply|check)\b:?\s*(.*?)\s*-->")
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+)(?P<language>[\w-]*)")
_RULE = re.compile(r"[-─━=]{3,}")
_DURATION = re.compile(r"\b\d+(?:\.\d+)? ?(?:ms|s|m|h|d)\b")


class PageError(AssertionError):
    """A page or a block is not marked as it should be, or did not do what it shows."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where commands run.

    Attributes:
        place: One of PLACES, or empty if they are not run.
        options: The options of the mark. `full` and `jobset` have an empty value.
    """

    place: str
    options: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Block:
    """A code block, or a hidden check.

    Attributes:
        line: The number of its first line in the page.
        where: The block's own mark.
        file: The file that it becomes.
        applied: Whether it is applied to the cluster.
        fails: Whether a command fails.
    """

    line: int
    language: str
    text: str
    where: Where | None = None
    file: str = ""
    applied: bool = False
    fails: bool = False


@dataclass(slots=True)
class Page:
    """A page's blocks in order, and its mark."""

    path: Path
    where: Where | None = None
    blocks: list[Block] = field(default_factory=list)

    def place(self, block: Block) -> str:
        """Return where a block runs. Empty if it does not."""
        where = block.where or self.where
        return where.place if where else ""

    def runs(self, place: str) -> bool:
        """Return whether a block of this page runs at a place."""
        return any(
            self.place(block) == place
            for block in self.blocks
            if block.language in COMMAND_LANGUAGES or block.applied
        )

    def option(self, place: str, name: str, default: str = "") -> str:
        """Return an option of the page, or of the first block that has it at this place."""
        marks = [self.where, *(block.where for block in self.blocks)]
        return next((mark.options[name] for mark in marks if _has(mark, place, name)), default)

    def has(self, place: str, name: str) -> bool:
        """Return whether the page, or a block, has an option at this place."""
        marks = [self.where, *(block.where for block in self.blocks)]
        return any(_has(mark, place, name) for mark in marks)


def _has(mark: Where | None, place: str, name: str) -> TypeGuard[Where]:
    return mark is not None and mark.place == place and name in mark.options


class Session(Protocol):
    """A shell that keeps variables and its directory from one command to the next."""

    def run(self, script: str) -> tuple[int, str]:
        """Run commands. Returns the exit code, and their output of both kinds in one text."""

    def write(self, name: str, text: str) -> None:
        """Write a file below the session's first directory."""

    def apply(self, manifest: str) -> None:
        """Apply a manifest to the cluster."""

    def shown(self, text: str) -> str:
        """Return expected output with the session's own names in place of those that the page shows."""


def read_page(path: Path) -> Page:
    """Read a page. Raises PageError if a mark cannot be understood."""
    page = Page(path)
    pending = dict[str, str]()
    lines = list(enumerate(path.read_text().splitlines(), 1))
    position = 0
    while position < len(lines):
        number, line = lines[position]
        position += 1
        if fence := _FENCE.match(line):
            end = _closing(lines, position, fence["fence"])
            indent = len(fence["indent"])
            body = "".join(f"{text[indent:]}\n" for _, text in lines[position:end])
            page.blocks.append(_block(path, number, fence["language"], body, pending))
            pending = {}
            position = end + 1
        elif comment := _COMMENT.search(line):
            kind, value = comment.groups()
            if kind == "check":
                where = _parse_where(path, number, pending)
                page.blocks.append(Block(number, "sh", f"{value}\n", where))
            else:
                pending[kind] = value
        elif line.strip():
            _page_mark(page, number, pending)
            pending = {}
    return page


def readable_pages(paths: Iterable[Path]) -> Iterator[Page]:
    """Yield the pages whose marks can be understood. A test reports the others (`unreadable_pages`)."""
    for path in paths:
        with contextlib.suppress(PageError):
            yield read_page(path)


def unreadable_pages(paths: Iterable[Path]) -> Iterator[str]:
    """Yield a sentence for each page whose marks cannot be understood."""
    for path in paths:
        try:
            read_page(path)
        except PageError as error:
            yield str(error)


def _closing(lines: list[tuple[int, str]], position: int, fence: str) -> int:
    for index in range(position, len(lines)):
        if lines[index][1].strip() == fence:
            return index
    raise PageError(f"line {lines[position - 1][0]}: the code block has no end")


def _page_mark(page: Page, number: int, marks: dict[str, str]) -> None:
    """Take marks that stand before text as the page's, if nothing else did."""
    if not marks:
        return
    if page.blocks or page.where or not marks.keys() <= {"run", "not run"}:
        raise PageError(
            f"{page.path}:{number}: the mark above belongs directly before a code block"
        )
    page.where = _parse_where(page.path, number, marks)


def _parse_where(path: Path, number: int, marks: dict[str, str]) -> Where | None:
    if "not run" in marks:
        if not marks["not run"]:
            raise PageError(f"{path}:{number}: say why it is not run")
        return Where("")
    if "run" not in marks:
        return None
    place, *words = marks["run"].split()
    options = dict(word.partition("=")[::2] for word in words)
    if place not in PLACES or not options.keys() <= OPTIONS:
        raise PageError(f"{path}:{number}: unknown place or option in “run: {marks['run']}”")
    return Where(place, options)


def _block(path: Path, number: int, language: str, text: str, marks: dict[str, str]) -> Block:
    return Block(
        number,
        language,
        text,
        where=_parse_where(path, number, marks),
        file=marks.get("file", ""),
        applied="apply" in marks,
        fails="fails" in marks,
    )


def faults(page: Page) -> Iterator[str]:
    """Yield what is wrong with a page before anything runs."""
    for block in page.blocks:
        place = f"{page.path}:{block.line}"
        if not block.language:
            yield f"{place}: the code block has no language (text, sh, console, yaml, …)"
        elif block.language in COMMAND_LANGUAGES and not (block.where or page.where or block.file):
            yield f"{place}: no mark says where these commands run, or why they do not"
        elif reader := READERS.get(block.language):
            try:
                reader(block.text)
            except (ValueError, SyntaxError, yaml.YAMLError) as error:
                yield f"{place}: the block is no {block.language}: {error}"
    for number in _indented_blocks(page.path.read_text()):
        yield f"{page.path}:{number}: indented code block: use a fence with a language"


def _indented_blocks(text: str) -> Iterator[int]:
    """Yield the numbers of the first lines of code blocks that are only indented."""
    inside, in_list, before_blank = "", False, True
    for number, line in enumerate(text.splitlines(), 1):
        if inside:
            inside = "" if line.strip() == inside else inside
            continue
        if fence := _FENCE.match(line):
            inside = fence["fence"]
        elif re.match(r"\s*([-*+]|\d+[.)]) ", line):
            in_list = True
        elif line and not line.startswith(" "):
            in_list = False
        elif line.startswith("    ") and before_blank and not in_list:
            yield number
        before_blank = not line.strip()


@dataclass(frozen=True, slots=True)
class Step:
    """A command and what it prints. None if a page does not show that."""

    command: str
    output: str | None


def steps(text: str) -> list[Step]:
    """Return a block's commands: all together, or one for each line that begins with `$ `."""
    if not re.search(r"^\$ ", text, re.MULTILINE):
        return [Step(text, None)]
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    if parts[0].strip():
        raise PageError(f"output before the first command: {parts[0].strip()}")
    return [_step(part) for part in parts[1:]]


def _step(text: str) -> Step:
    lines = text.splitlines()
    end = next(index for index, line in enumerate(lines) if not line.endswith("\\")) + 1
    return Step("\n".join(lines[:end]), "\n".join(lines[end:]).strip("\n"))


def matches(expected: str, printed: str) -> bool:
    """Return whether a program printed what a page shows."""
    pattern = "".join(map(_line_pattern, _normalised(expected)))
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _normalised(printed))) is not None


def _line_pattern(line: str) -> str:
    if line == "…":
        return r"(?:.*\n)*"
    return r".*".join(re.escape(part.strip()) for part in line.split("…")) + r"\n"


def _normalised(text: str) -> Iterator[str]:
    for line in text.splitlines():
        stripped = " ".join(_DURATION.sub("0s", _RULE.sub("---", line)).split())
        if stripped:
            yield stripped


def run_page(page: Page, place: str, session: Session) -> None:
    """Run the blocks of a page that belong to a place. Raises PageError at the first that does not work."""
    for block in page.blocks:
        at = f"{page.path}:{block.line}"
        if block.file and page.place(block) in {place, ""}:
            session.write(block.file, block.text)
        elif page.place(block) != place:
            continue
        elif block.applied:
            session.apply(block.text)
        elif block.language in COMMAND_LANGUAGES:
            run_block(block, session, at)


def run_block(block: Block, session: Session, at: str) -> None:
    """Run a block's commands and compare what they print."""
    failed = False
    for step in steps(block.text):
        code, printed = session.run(step.command)
        if code and not block.fails:
            raise PageError(f"{at}: exit code {code} of\n{step.command}\n\n{printed}")
        failed = failed or code != 0
        if step.output is not None and not matches(session.shown(step.output), printed):
            raise PageError(f"{at}: {step.command}\n\nexpected:\n{step.output}\n\ngot:\n{printed}")
    if block.fails and not failed:
        raise PageError(f"{at}: every command succeeded, though the page says that one fails")
