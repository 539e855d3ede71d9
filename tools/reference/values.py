"""The page of the chart's values: defaults and comments of values.yaml, types of its schema."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tools.reference.markdown import ROOT, MissingEntry, code, page, sentence, table

CHART = ROOT / "deploy" / "chart"

USUAL = {
    "pullPolicy": "when the kubelet pulls the image",
    "imagePullSecrets": "Secrets by which the kubelet pulls images",
    "repository": "name of the image, without its tag",
    "tag": "tag of the image",
    "digest": "digest of the image. It precedes the tag",
    "nameOverride": "replaces the chart's name in names of objects",
    "fullnameOverride": "replaces the whole first part of names of objects",
    "resources": "requests and limits of the containers",
    "nodeSelector": "labels of the nodes on which the pods may run",
    "tolerations": "taints that the pods tolerate",
    "affinity": "affinity of the pods",
    "priorityClassName": "PriorityClass of the pods",
    "podAnnotations": "annotations of the pods",
    "labels": "further labels",
    "annotations": "further annotations",
    "extraArgs": "further options of the program",
    "enabled": "whether this part is installed",
    "replicas": "number of pods",
    "port": "port of the program",
    "image": "image of the containers",
    "interval": "time between two scrapes",
}
"""Meanings of values that all charts have."""


def values_page() -> str:
    """Return the page. Raises MissingEntry if a value has no comment."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    comments = read_comments((CHART / "values.yaml").read_text())
    rows = dict[str, list[tuple[str, str, str, str]]]()
    for path, default, kind in _leaves(values, schema):
        top = path.partition(".")[0]
        text = _meaning(path, comments)
        rows.setdefault(top, []).append((code(path), kind, code(_shown(default)), text))
    parts = []
    for top, entries in rows.items():
        parts.append(f"## {top}")
        if len(entries) > 1 and comments.get(top):
            parts.append(comments[top])
        parts.append(table(("value", "type", "default", "meaning"), entries))
    first = (
        "Each value of the Helm chart. `helm upgrade … --set NAME=VALUE` changes one. "
        "Unknown names are rejected."
    )
    return page("Chart values", first, "deploy/chart/values.yaml", *parts)


def read_comments(text: str) -> dict[str, str]:
    """Return the comment above, or behind, each key of a YAML text, by the key's path."""
    found, above, path = dict[str, str](), list[str](), list[tuple[int, str]]()
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            above.append(stripped.lstrip("# "))
            continue
        key = re.match(r"^( *)([\w.-]+):(?:\s+(.*))?$", line)
        if not key or line.lstrip().startswith("- "):
            above = []
            continue
        indent = len(key[1])
        path = [(depth, name) for depth, name in path if depth < indent] + [(indent, key[2])]
        name = ".".join(part for _, part in path)
        behind = re.search(r"\s# (.+)$", f" {key[3] or ''}")
        if above or behind:
            found[name] = " ".join(above) or (behind[1] if behind else "")
        above = []
    return found


def _leaves(
    values: Mapping[str, Any], schema: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, str]]:
    """Yield path, default and type of each value that has no further ones in the schema."""
    properties = schema.get("properties", {})
    for name, value in values.items():
        known = properties.get(name, {})
        path = f"{prefix}{name}"
        if isinstance(value, dict) and known.get("properties"):
            yield from _leaves(value, known, f"{path}.")
        else:
            yield path, value, _kind(known, value)


def _kind(schema: Mapping[str, Any], value: Any) -> str:
    if "enum" in schema:
        return ", ".join(code(str(choice)) for choice in schema["enum"])
    kind = schema.get("type") or {
        bool: "boolean",
        str: "string",
        dict: "object",
        list: "array",
    }.get(type(value), "number")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _meaning(path: str, comments: Mapping[str, str]) -> str:
    own = comments.get(path) or USUAL.get(path.rpartition(".")[2], "")
    if own:
        return sentence(own)
    parent = path.rpartition(".")[0]
    while parent:
        if comments.get(parent):
            return sentence(comments[parent])
        parent = parent.rpartition(".")[0]
    raise MissingEntry(f"deploy/chart/values.yaml: {path} has no comment")


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if value not in ("", None) else '""'
