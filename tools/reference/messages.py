"""The index of error sentences, read from the source: which sentence means what, and which page helps."""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fenka.core.reasons import ReasonCode
from tools.reference.markdown import (
    ROOT,
    SOURCE,
    MissingEntry,
    code,
    page,
    parsed,
    sentence,
    table,
)

TABLE = Path(__file__).with_name("messages.toml")
GAP = "…"
"""In a sentence: what differs from case to case."""

REASONS = {
    ReasonCode.MEMORY: "the card has less free memory than the slice",
    ReasonCode.COMPUTE: "shares on the card leave less than the slice's share",
    ReasonCode.IN_USE: "slices use the card, and the request is for a whole one",
    ReasonCode.WHOLE: "somebody has the whole card",
    ReasonCode.MODEL: "the request names other models",
    ReasonCode.DIVIDED: "the card is divided into MIG instances, which the request is not for",
    ReasonCode.INSTANCE: "the card has no MIG instance of this profile, and no room for one",
    ReasonCode.UNHEALTHY: "the driver has reported a fault of the card",
    ReasonCode.CORDONED: "an administrator has taken the card out",
    ReasonCode.RESERVED: "the card is kept for a request that is first",
    ReasonCode.TOO_FEW: "the node has too few such cards for a request of several",
    ReasonCode.NOT_LINKED: "NVLink connects too few such cards of the node, and the request requires it",
    ReasonCode.CPU: "the host has less CPU left than the request",
    ReasonCode.HOST_MEMORY: "the host has less memory left than the request",
}
"""Meanings of the reasons why a card does not fit."""

_FAULT = re.compile(r'(?:return|lease_refuse\("[^"]*",|say\(path,) "([^"]{5,})"')
"""A fault in the library's sources."""

_MAKERS = {"UserError", "print_error", "typer.BadParameter", "BadParameter"}
"""Functions and classes beside fenka's exceptions whose first argument users read."""


@dataclass(frozen=True, slots=True)
class Message:
    """A sentence of the source.

    Attributes:
        text: The sentence, with GAP for what differs.
        error: The name of its class.
        module: The path of the module below src/fenka.
    """

    text: str
    error: str
    module: str


def messages_page() -> str:
    """Return the page. Raises MissingEntry if a folder of the source has no group or an error no cause."""
    groups = tomllib.loads(TABLE.read_text())
    causes = error_classes()
    rows: dict[str, list[Message]] = {name: [] for name in groups}
    for message in messages():
        rows[_group(message, groups)].append(message)
    parts = []
    for name, group in groups.items():
        if not rows[name]:
            raise MissingEntry(f"{TABLE.name}: no sentence belongs to {name}")
        parts += [f"## {group['title']}", group["text"]]
        parts.append(
            table(
                ("sentence", "cause"),
                sorted((_shown(message.text), _cause(message, causes)) for message in rows[name]),
            )
        )
    if REASONS.keys() != set(ReasonCode):
        raise MissingEntry(f"reasons without a meaning: {set(ReasonCode) ^ REASONS.keys()}")
    reasons = [(code(reason.value), sentence(text)) for reason, text in REASONS.items()]
    parts += [
        "## Why a card does not fit",
        "`no GPU fits: 5 of 8 have too little memory, …` counts cards by reason. "
        "What helps: [a pod is pending](pod-pending.md).",
        table(("reason", "meaning"), reasons),
        "## A program without the GPU",
        f"`fenka: no GPU for this process: {GAP}` names a file of the lease and one of these faults. "
        "What helps: [no GPU](no-gpu.md).",
        table(("fault",), [(_shown(text),) for text in sorted(library_faults())]),
    ]
    first = (
        "Look here for a sentence that fenka printed, with your browser's search or that of this site. "
        f"`{GAP}` stands for names and numbers."
    )
    return page("Error messages", first, "the exceptions in src/fenka", *parts)


def library_faults() -> set[str]:
    """Return the ends of the sentence with which the library in a program refuses the GPU."""
    found = set[str]()
    for file in (ROOT / "native" / "shim").rglob("*.c"):
        found.update(_FAULT.findall(file.read_text()))
    return {text.strip() for text in found}


def _group(message: Message, groups: dict[str, dict[str, object]]) -> str:
    for name, group in groups.items():
        modules = group["modules"]
        assert isinstance(modules, list)
        if any(message.module.startswith(prefix) for prefix in modules):
            return name
    raise MissingEntry(f"{TABLE.name}: no group has the modules of {message.module}")


def _shown(text: str) -> str:
    """Return a sentence as Markdown."""
    cleaned = re.sub(r"(?:…\s*){2,}", f"{GAP} ", text).strip()
    return re.sub(r"([<>*_\[\]|])", r"\\\1", cleaned.replace("`", ""))


def _cause(message: Message, causes: dict[str, str]) -> str:
    if message.error in _MAKERS:
        return ""
    return sentence(causes.get(message.error, "").split(". ")[0])


@cache
def error_classes() -> dict[str, str]:
    """Return the docstring of each exception class of fenka's, by name. Raises MissingEntry without one."""
    bases, texts = dict[str, set[str]](), dict[str, str]()
    for nodes in parsed().values():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                known = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                bases.setdefault(node.name, set()).update(known)
                texts.setdefault(node.name, ast.get_docstring(node) or "")
    found, before = {"FenkaError"}, 0
    while len(found) != before:
        before = len(found)
        found |= {name for name, known in bases.items() if known & found}
    without = sorted(name for name in found if not texts.get(name))
    if without:
        raise MissingEntry(f"exceptions without a docstring: {', '.join(without)}")
    return {name: texts[name] for name in found}


@cache
def messages() -> list[Message]:
    """Return all sentences, each once a module."""
    classes = error_classes().keys() | _MAKERS
    found = dict[Message, None]()
    for file, nodes in parsed().items():
        module = str(file.relative_to(SOURCE))
        for name, text in _calls(nodes, classes):
            if len(re.findall(r"[a-z]{2,}", text)) >= 3:
                found[Message(text, name, module)] = None
    return [*found]


def _calls(nodes: list[ast.AST], classes: set[str]) -> Iterator[tuple[str, str]]:
    """Yield class and text of the calls whose first text is a sentence for users."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in classes:
            for argument in node.args:
                if text := _text(argument):
                    yield name, text
                    break


def _text(node: ast.expr) -> str:
    """Return a text with gaps; empty if it has no words of its own."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) or GAP for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (_text(left) or GAP) + (_text(right) or GAP)
        case ast.IfExp(body=body, orelse=other):
            return _text(body) or _text(other)
        case _:
            return ""
