"""Measures the tree, and holds it to the bounds in pyproject.toml.

    python tools/measure.py [--check]

Code lines are lines with code: docstrings, comments and empty lines do not count. A name is shared if several
modules or classes have it. `__init__`, `__main__` and what protoc makes are no modules here.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONG_FUNCTION, LONG_SENTENCE = 60, 30
SUBJECT_LINES = 40
"""Code lines from which on a part of a module that names nothing of its others is a subject of its own."""
PLACEHOLDERS = {"each", "it"}
"""Names of variables that do not say what the thing is."""

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_UNNAMED = re.compile(
    r"(?:What|Whatever|Who|Whoever) .*[^?]|.*\b(?:so (?:long|many|much|few)|of the same)[.:;!]",
    re.DOTALL,
)
"""A sentence whose subject is a clause in place of a noun, or whose last words leave the thing out."""
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n\s*(?=[-*|]|\d+\. )")


@dataclass(slots=True)
class Measures:
    """What was counted in a folder.

    Attributes:
        code_lines: Lines with code.
        import_lines: Lines of import statements, among the code lines.
        modules: How many modules have a name.
        classes: How many classes of modules have a name.
        functions: The lines of each function, by its place.
        placeholders: Variables and arguments named in PLACEHOLDERS.
        long_sentences: Sentences of docstrings and comments with more than LONG_SENTENCE words.
        unnamed_things: Sentences of docstrings and comments with a clause for a noun, or without the noun.
        class_lines: The lines of each class, by its place.
        several_subjects: Modules with parts of SUBJECT_LINES and more that name nothing of each other.
    """

    code_lines: int = 0
    import_lines: int = 0
    folders: Counter[str] = field(default_factory=Counter)
    modules: Counter[str] = field(default_factory=Counter)
    classes: Counter[str] = field(default_factory=Counter)
    functions: dict[str, int] = field(default_factory=dict)
    placeholders: int = 0
    long_sentences: int = 0
    unnamed_things: int = 0
    class_lines: dict[str, int] = field(default_factory=dict)
    several_subjects: list[str] = field(default_factory=list)

    def add(self, file: Path, root: Path) -> None:
        """Count a Python file."""
        source = file.read_text()
        tree = ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        prose = [*_docstrings(tree), *_comments(tokens)]
        documented = {line for lines, _ in prose for line in lines}
        code = _code_lines(tokens) - documented
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        self.code_lines += len(code)
        self.import_lines += len(code & {line for node in imports for line in _lines(node)})
        self.folders[str(file.parent.relative_to(root))] += 1
        if not file.stem.startswith("__"):
            self.modules[file.stem] += 1
        self.classes.update(node.name for node in tree.body if isinstance(node, ast.ClassDef))
        place = file.relative_to(root)
        if sum(lines >= SUBJECT_LINES for lines in parts(tree, code)) > 1:
            self.several_subjects.append(str(place))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions[f"{place}:{node.lineno} {node.name}"] = len(code & set(_lines(node)))
            if isinstance(node, ast.ClassDef):
                # With its docstrings and comments: a reader has to find his way through all of them.
                self.class_lines[f"{place}:{node.lineno} {node.name}"] = len(_lines(node))
            match node:
                case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                    self.placeholders += name in PLACEHOLDERS
        self.long_sentences += sum(long_sentences(text) for _, text in prose)
        self.unnamed_things += sum(unnamed_things(text) for _, text in prose)


def measure(folder: Path) -> Measures:
    """Count all Python files of a folder."""
    measures = Measures()
    for file in sorted(folder.rglob("*.py")):
        if not file.stem.endswith("_pb2"):
            measures.add(file, folder)
    return measures


def long_sentences(text: str) -> int:
    """Return how many sentences of a text have more than LONG_SENTENCE words."""
    sentences = _SENTENCE_END.split(text)
    return sum(len(sentence.split()) > LONG_SENTENCE for sentence in sentences)


def unnamed_things(text: str) -> int:
    """Return how many sentences of a text begin with a clause for a noun, or end without their thing."""
    return sum(
        _UNNAMED.fullmatch(sentence.strip()) is not None for sentence in _SENTENCE_END.split(text)
    )


def parts(tree: ast.Module, code: set[int]) -> list[int]:
    """Return the code lines of each part of a module. A part is the definitions that name each other.

    Assignments and imports belong to no part, since a logger or a constant does not make two subjects one.
    """
    definitions = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    part = {name: name for name in definitions}

    def first(name: str) -> str:
        while part[name] != name:
            name = part[name]
        return name

    for name, node in definitions.items():
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id in definitions:
                part[first(inner.id)] = first(name)
    sizes = Counter[str]()
    for name, node in definitions.items():
        sizes[first(name)] += len(code & set(_lines(node)))
    return list(sizes.values())


def figures(root: Path) -> dict[str, float]:
    """Return all figures of a checkout by the names of their bounds."""
    src, tests = measure(root / "src"), measure(root / "tests")
    return {
        "import_percent": round(100 * src.import_lines / src.code_lines, 1),
        "modules_with_several_subjects": len(src.several_subjects),
        "largest_class": max(src.class_lines.values()),
        "shared_module_names": sum(count > 1 for count in src.modules.values()),
        "shared_class_names": sum(count > 1 for count in src.classes.values()),
        "long_functions": sum(lines > LONG_FUNCTION for lines in src.functions.values()),
        "longest_function": max(src.functions.values()),
        "placeholder_names": src.placeholders,
        "long_sentences": src.long_sentences,
        "unnamed_things": src.unnamed_things,
        "test_ratio": round(tests.code_lines / src.code_lines, 2),
    }


def bounds(root: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return the largest and the smallest allowed value of figures, from pyproject.toml."""
    table = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["fenka"]["measure"]
    return dict(table["at_most"]), dict(table["at_least"])


def _docstrings(tree: ast.Module) -> Iterator[tuple[range, str]]:
    """Yield the lines and the text of each docstring."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield _lines(node), text


def _comments(tokens: list[tokenize.TokenInfo]) -> Iterator[tuple[range, str]]:
    """Yield the text of each block of comments. Its lines are no code anyway."""
    block, after = list[str](), 0
    for token in tokens:
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            if block and token.start[0] != after:
                yield range(0), "\n".join(block)
                block.clear()
            block.append(token.string.lstrip("# "))
            after = token.start[0] + 1
    yield range(0), "\n".join(block)


def _code_lines(tokens: list[tokenize.TokenInfo]) -> set[int]:
    return {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def main(arguments: list[str]) -> int:
    """Print the figures, or with --check only those out of their bounds; then the exit code is 1."""
    known, (at_most, at_least) = figures(ROOT), bounds(ROOT)
    wrong = [
        name
        for name, value in known.items()
        if value > at_most.get(name, value) or value < at_least.get(name, value)
    ]
    for name in wrong if "--check" in arguments else known:
        bound = f"at most {at_most[name]:g}" if name in at_most else f"at least {at_least[name]:g}"
        sign = "  out of its bound: see `make measure`" if name in wrong else ""
        print(f"{name.replace('_', ' '):<29} {known[name]:>8g}  {bound}{sign}")
    if "--check" not in arguments:
        src = measure(ROOT / "src")
        print(f"\n{sum(src.folders.values())} modules, {src.code_lines} code lines")
        print("\nmodules with several subjects:", *src.several_subjects, sep="\n  ")
        shared = sorted(name for name, count in src.modules.items() if count > 1)
        print("\nmodule names of several files:", ", ".join(shared))
        shared = sorted(name for name, count in src.classes.items() if count > 1)
        print("\nclass names of several classes:", ", ".join(shared))
        for what, lines in (("functions", src.functions), ("classes", src.class_lines)):
            longest = sorted(lines.items(), key=lambda place: -place[1])[:10]
            print(f"\nlongest {what}:", *(f"  {n:>3} {place}" for place, n in longest), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
