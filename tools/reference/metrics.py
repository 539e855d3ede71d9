"""The page of metrics, read from the calls in the source that make them."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fenka.dialects import gpu_manager
from tools.reference.markdown import SOURCE, MissingEntry, code, page, sentence, table

PROGRAMS = {
    "node program and of the workstation's daemon": "server/gpu_metrics.py",
    "node program": "node/monitor/metrics.py",
    "scheduler and of the workstation's daemon": "server/queue_metrics.py",
    "scheduler": "scheduler/metrics.py",
    "autoscaler": "autoscaler/metrics.py",
    "gateway": "gateway/metrics.py",
}
KINDS = {
    "gauge": "gauge",
    "gauges": "gauge",
    "counters": "counter",
    "_gauge": "gauge",
    "Gauge": "gauge",
    "Counter": "counter",
    "Histogram": "histogram",
    "GaugeMetricFamily": "gauge",
    "CounterMetricFamily": "counter",
    "HistogramMetricFamily": "histogram",
}
"""The kind of metric that each function makes."""
HELPERS = {"_gauge", "gauge", "gauges", "counters"}
CARD_LABELS = ("index", "model", "node", "uuid")
"""Of the scheduler's cards, which are written without the library."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as Prometheus sees it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def metrics_page() -> str:
    """Return the page. Raises MissingEntry if a metric's name or text cannot be read."""
    parts = []
    for program, file in PROGRAMS.items():
        rows = [
            (
                code(metric.name),
                metric.kind,
                ", ".join(map(code, metric.labels)),
                sentence(metric.text),
            )
            for metric in metrics_of(SOURCE / file)
        ]
        head = ("name", "type", "labels", "meaning")
        parts += [f"## Of the {program}", table(head, rows)]
    first = (
        "Each metric that fenka's programs serve at `/metrics`. "
        "The workstation's daemon has a namespace for each user and a pod for each job. "
        "The pages [monitor](../do/monitor.md) and [events](events.md) say what to watch."
    )
    return page("Metrics", first, "the modules `metrics.py`", *parts)


def metrics_of(file: Path) -> list[Metric]:
    """Return a module's metrics in their order."""
    tree = ast.parse(file.read_text())
    name = "fenka." + ".".join(file.relative_to(SOURCE).with_suffix("").parts)
    known = vars(import_module(name))
    prefix = next(
        (
            ast.literal_eval(node.value)
            if isinstance(node.value, ast.Constant)
            else known["PREFIX"]
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "prefix"
        ),
        "",
    )
    found = [*_full_names(tree)]
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name not in HELPERS:
            found += _of_function(function, {**known, "self.prefix": prefix}, prefix, file)
    if not found:
        raise MissingEntry(f"{file}: no metrics were found")
    return list(dict.fromkeys(found))


def _full_names(tree: ast.Module) -> Iterator[Metric]:
    """Yield metrics that a table of the module names in full."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple) and len(node.elts) >= 2:
            name, text = map(_string, node.elts[:2])
            if name and text and name.startswith("fenka_"):
                yield Metric(name, "gauge", CARD_LABELS, text)


def _of_function(
    function: ast.FunctionDef, known: Mapping[str, Any], prefix: str, file: Path
) -> Iterator[Metric]:
    """Yield the metrics that a function makes: by name, or one for each row of a table of its own."""
    assigned = [
        (node.lineno, ast.unparse(node.targets[0]), text)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and (text := _string(node.value))
    ]
    for call in ast.walk(function):
        if not isinstance(call, ast.Call) or len(call.args) < 2:
            continue
        maker = ast.unparse(call.func).rpartition(".")[2]
        if maker not in KINDS:
            continue
        own = maker in {"gauge", "gauges", "counters"}
        labels = _labels(call, maker, known)
        total = "_total" if KINDS[maker] == "counter" else ""
        first, second = call.args[:2]
        before = [
            text
            for line, name, text in assigned
            if name == ast.unparse(second) and line < call.lineno
        ]
        names = _pattern(first, known, prefix if own else "")
        if "{}" not in names:
            text = _text(second, known) or (before[-1] if before else "")
            if not text:
                raise MissingEntry(f"{file}:{call.lineno}: the metric has no text")
            yield Metric(names + total, KINDS[maker], labels, text)
            continue
        rows = list(_rows(function))
        if not rows:
            raise MissingEntry(f"{file}:{call.lineno}: the metric's name cannot be read")
        for part, text, extra in rows:
            yield Metric(names.replace("{}", part) + total, KINDS[maker], (*labels, *extra), text)


def _rows(function: ast.FunctionDef) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield name, text and further labels of the rows of a function's table."""
    gpu_manager_metrics = iter(gpu_manager.METRICS)
    for node in ast.walk(function):
        if isinstance(node, ast.Tuple) and len(node.elts) >= 3:
            name, text = map(_string, node.elts[:2])
            if name and text:
                yield name, text, ()
            elif isinstance(node.elts[0], ast.Name) and text:
                metric = next(gpu_manager_metrics)
                yield metric.name, text, (metric.label,)


def _pattern(node: ast.expr, known: Mapping[str, Any], prefix: str) -> str:
    """Return a name, with {} for the part that a table's row gives."""
    match node:
        case ast.Constant(value=str(text)):
            return prefix + text
        case ast.JoinedStr(values=values):
            return "".join(_pattern(value, known, "") for value in values)
        case ast.FormattedValue(value=value):
            return str(known.get(ast.unparse(value), "{}"))
        case ast.BinOp(left=left, right=right):
            return _pattern(left, known, "") + _pattern(right, known, "")
        case _:
            return str(known.get(ast.unparse(node), "{}"))


def _text(node: ast.expr, known: Mapping[str, Any]) -> str:
    if isinstance(node, ast.Constant | ast.JoinedStr):
        return _pattern(node, known, "")
    return ""


def _labels(call: ast.Call, maker: str, known: Mapping[str, Any]) -> tuple[str, ...]:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "labels"]
    at = (
        call.args[2:3]
        if maker in {"_gauge", "gauges", "counters", "Counter", "Gauge", "Histogram"}
        else []
    )
    for node in (*given, *at):
        if isinstance(node, ast.Tuple | ast.List | ast.Name):
            local = {**known, "metric": _NoLabel}
            values: Sequence[str] = eval(ast.unparse(node), dict(local))
            return tuple(value for value in values if value)
    return ()


class _NoLabel:
    """Stands for gpu-manager's metric in the expression of its labels: rows give that label."""

    label = ""


def _string(node: ast.expr) -> str | None:
    """Return the text of a constant, None for another expression."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
