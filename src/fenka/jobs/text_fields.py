"""Reads trainings and services from fields as text: options of commands, and files.

All values are texts, converted by the fields' types. So `cpu: 2` in a file means the same as `--cpu 2`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import msgspec

from fenka.core.request import InvalidRequest
from fenka.formats import documents, durations, quantities
from fenka.formats.documents import MAX_BYTES, InvalidYaml, parse_yaml
from fenka.jobs.workload import PodOptions, RoleSpec

S = TypeVar("S", bound=PodOptions)


Fields = Mapping[str, Any]
"""Texts, lists and mappings of texts, by the names of fields."""


_PATH = re.compile(r"\$\.([a-z-]+)(?:\.([a-z-]+))?")


def parse_duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `10m`, `2h30m` or `1d`. Raises InvalidRequest."""
    if re.fullmatch(r"-?[0-9]{1,9}(?:\.[0-9]{1,6})?", text):
        return float(text)
    seconds = durations.parse_duration(text)
    if seconds is None:
        raise InvalidRequest(f"invalid time {text[:40]!r}: expected for example 90s, 10m or 2h30m")
    return seconds


def parse_fields(fields: Fields, kind: type[S]) -> S:
    """Return the training or service with these fields; it is not validated. Raises InvalidRequest."""
    _check_texts(fields)
    durations = {
        field.encode_name for field in msgspec.structs.fields(kind) if field.name.endswith("_s")
    }
    converted = {
        name: parse_duration(value) if name in durations and isinstance(value, str) else value
        for name, value in fields.items()
    }
    roles = [
        field.encode_name
        for field in msgspec.structs.fields(kind)
        if isinstance(field.type, type) and issubclass(field.type, RoleSpec)
    ]
    converted = _with_percentage(converted)
    for name in roles:
        if isinstance(role := converted.get(name), Mapping):
            converted[name] = _with_percentage(role)
    try:
        documents.check_names(converted, kind)
    except documents.InvalidDocument as why:
        raise InvalidRequest(str(why)) from None
    try:
        return msgspec.convert(converted, kind, strict=False)
    except msgspec.ValidationError as why:
        raise InvalidRequest(_sentence(str(why), fields)) from None


def _with_percentage(fields: Fields) -> dict[str, Any]:
    """Return the fields with a share of `50%` as the number 50."""
    text = fields.get("gpu-core")
    percent = durations.parse_percent(text) if isinstance(text, str) else None
    return {**fields, **({} if percent is None else {"gpu-core": percent})}


def merge(lower: Fields, upper: Fields) -> dict[str, Any]:
    """Return the fields of both; `upper` prevails, and mappings are merged."""
    merged = dict(lower)
    for name, value in upper.items():
        known = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(known, Mapping)
        merged[name] = {**cast(Fields, known), **value} if both else value
    return merged


def read_file(path: Path, kind: type[PodOptions]) -> dict[str, Any]:
    """Return the fields of a YAML file. Raises InvalidRequest, OSError."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    try:
        # Every scalar is a text: the fields' own types say what it means.
        fields = parse_yaml(data, as_texts=True)
    except InvalidYaml as why:
        raise InvalidRequest(f"{path} {why}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"{path} must be a mapping of fields, as in `name: mpi-dist`")
    lists = {
        field.encode_name
        for field in msgspec.structs.fields(kind)
        if list[str] in (field.type, *get_args(field.type))
    }
    return {
        # A list of one may be written without its dash.
        name: [value] if name in lists and isinstance(value, str) else value
        for name, value in fields.items()
    }


def _check_texts(value: object) -> None:
    """Check that nothing is in the texts that no process can be given. Raises InvalidRequest."""
    if isinstance(value, Mapping):
        _check_texts([*value, *value.values()])
    elif isinstance(value, list):
        for item in value:
            _check_texts(item)
    elif isinstance(value, str) and (
        "\0" in value or value.encode(errors="replace").decode() != value
    ):
        raise InvalidRequest(f"{value[:40]!r} is no text in UTF-8: write it in UTF-8, without NUL")


def _sentence(why: str, fields: Fields) -> str:
    path = _PATH.search(why)
    if path is None:
        return f"invalid fields: {why}"
    option = "-".join(filter(None, path.groups()))
    value: Any = fields
    for name in filter(None, path.groups()):
        value = value.get(name, "") if isinstance(value, Mapping) else value
    expected = why.partition(",")[0].partition(" - at ")[0]
    if path[path.lastindex or 0] == "gpus":
        return f"--{option}: {quantities.no_whole_cards(str(value))}"
    types = {"`int": "a whole number", "`float": "a number", "`bool": "true or false"}
    word = next((text for name, text in types.items() if f"Expected {name}" in expected), "")
    return f"invalid --{option} {str(value)[:40]!r}: expected {word or _choices(option)}"


def _choices(option: str) -> str:
    return {
        "clean-task-policy": "Running or All",
        "success-policy": "ChiefWorker or AllWorkers",
        "image-pull-policy": "Always, IfNotPresent or Never",
        "gpu-core-mode": "hard, soft or weight",
        "service": "LoadBalancer, NodePort or ClusterIP",
        "scaler": "keda or fenka",
    }.get(option.removeprefix("worker-").removeprefix("ps-"), "another form: see --help")
