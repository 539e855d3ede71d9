"""The queries of the chart's boards and rules, and a Prometheus that answers them."""

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

FILES = Path(__file__).parent.parent / "deploy" / "chart" / "files"
BOARDS = ("gpu-app", "gpu-operators")
Json = dict[str, Any]
Samples = list[tuple[dict[str, str], float]]
"""The labels of each series, and its value."""

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not on the PATH: .ci/run unpacks Debian's",
)


def panel_queries(board: str) -> dict[str, list[str]]:
    """Return the queries of a board's panels by title, with everything selected, as Grafana sends them."""
    content = json.loads((FILES / f"{board}.json").read_text())
    return {
        panel["title"]: [_sent(target["expr"]) for target in panel["targets"]]
        for panel in content["panels"]
    }


def board_queries(board: str) -> list[str]:
    """Return all queries of a board: its panels', its annotations', and those of its variables."""
    content = json.loads((FILES / f"{board}.json").read_text())
    variables = [
        re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
        for variable in content["templating"]["list"]
        if variable["type"] == "query"
    ]
    panels = panel_queries(board).values()
    return [
        *(expr for exprs in panels for expr in exprs),
        *(_sent(annotation["expr"]) for annotation in content["annotations"]["list"]),
        *(f"group by ({match[2]}) ({_sent(match[1])})" for match in variables if match),
    ]


def rule_queries() -> dict[str, str]:
    """Return the expressions of the chart's rules by the names of metrics and alerts."""
    groups = yaml.safe_load((FILES / "rules.yaml").read_text())["groups"]
    return {
        rule.get("record") or rule["alert"]: rule["expr"]
        for group in groups
        for rule in group["rules"]
    }


def _sent(expr: str) -> str:
    for name, value in (
        ("$__rate_interval", "1m"),
        ("$namespace", ".*"),
        ("$pod", ".*"),
        ("$node", ".*"),
    ):
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


def samples(answer: Mapping[str, Any]) -> Samples:
    """Return what Prometheus' API answers to an instant query. An error fails the test."""
    assert answer["status"] == "success", answer
    result = answer["data"]["result"]
    return [(sample["metric"], float(sample["value"][1])) for sample in result]


class Prometheus:
    """A Prometheus on a port of 127.0.0.1."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str, **arguments: str) -> Any:
        """Return an answer of its API, which may be an error."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as why:
            return json.loads(why.read())

    def query(self, expr: str) -> Samples:
        """Return the samples of an instant query. An error fails the test."""
        return samples(self.get("query", query=expr))

    def answers(self) -> bool:
        """Return whether it accepts requests."""
        try:
            return bool(self.get("status/buildinfo")["status"] == "success")
        except (OSError, ValueError):
            return False


@contextmanager
def prometheus(port: int, folder: Path, jobs: list[Json]) -> Iterator[Prometheus]:
    """Run Prometheus with the chart's rules. jobs: its scrape configurations."""
    rules = [str(FILES / "rules.yaml")]
    interval = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    file = folder / "prometheus.yaml"
    file.write_text(
        yaml.safe_dump({"global": interval, "rule_files": rules, "scrape_configs": jobs})
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait()
