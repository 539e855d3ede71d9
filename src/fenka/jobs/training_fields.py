"""Reads trainings from fields as text: options of commands, and files.

All values are texts, converted by the fields' types. So `cpu: 2` in a file means the same as `--cpu 2`.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from fenka.core.request import InvalidRequest
from fenka.jobs.training import TrainingSpec

Fields = Mapping[str, Any]
"""Texts, lists and mappings of texts, by the names of fields."""

_DURATION = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,6})?[smhd])+")
_PART = re.compile(r"([0-9.]+)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATIONS = {
    field.encode_name for field in msgspec.structs.fields(TrainingSpec) if field.name.endswith("_s")
}
_LISTS = {
    field.encode_name
    for field in msgspec.structs.fields(TrainingSpec)
    if list[str] in (field.type, *get_args(field.type))
}
_PATH = re.compile(r"\$\.([a-z-]+)(?:\.([a-z-]+))?")


def parse_duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `10m`, `2h30m` or `1d`. Raises InvalidRequest."""
    if re.fullmatch(r"-?[0-9]{1,9}(?:\.[0-9]{1,6})?", text):
        return float(text)
    if not _DURATION.fullmatch(text):
        raise InvalidRequest(f"invalid time {text[:40]!r}: expected for example 90s, 10m or 2h30m")
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))


def parse_fields(fields: Fields) -> TrainingSpec:
    """Return the training with these fields; it is not validated. Raises InvalidRequest."""
    _check_texts(fields)
    converted = {
        name: parse_duration(value) if name in _DURATIONS and isinstance(value, str) else value
        for name, value in fields.items()
    }
    try:
        return msgspec.convert(converted, TrainingSpec, strict=False)
    except msgspec.ValidationError as why:
        raise InvalidRequest(_sentence(str(why), fields)) from None


def merge(lower: Fields, upper: Fields) -> dict[str, Any]:
    """Return the fields of both; `upper` prevails, and mappings are merged."""
    merged = dict(lower)
    for name, value in upper.items():
        known = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(known, Mapping)
        merged[name] = {**cast(Fields, known), **value} if both else value
    return merged


def read_file(path: Path) -> dict[str, Any]:
    """Return the fields of a YAML file. Raises InvalidRequest, OSError."""
    import yaml

    try:
        # Every scalar is a text: the fields' own types say what it means.
        fields = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as why:
        reason = " ".join(str(why).split())
        raise InvalidRequest(f"{path} cannot be read as YAML: {reason}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"{path} must be a mapping of fields, as in `name: mpi-dist`")
    return {
        # A list of one may be written without its dash.
        name: [value] if name in _LISTS and isinstance(value, str) else value
        for name, value in fields.items()
    }


def _check_texts(value: object) -> None:
    """Check that nothing is in the texts that no process can be given. Raises InvalidRequest."""
    if isinstance(value, Mapping):
        _check_texts([*value, *value.values()])
    elif isinstance(value, list):
        for each in value:
            _check_texts(each)
    elif isinstance(value, str) and (
        "\0" in value or value.encode(errors="replace").decode() != value
    ):
        raise InvalidRequest(f"{value[:40]!r} is no text in UTF-8: write it in UTF-8, without NUL")


def _sentence(why: str, fields: Fields) -> str:
    unknown = re.search(r"unknown field `([^`]*)`", why)
    if unknown:
        path = _PATH.search(why)
        prefix = f"{path[1]}." if path else ""
        known = [field.encode_name for field in msgspec.structs.fields(TrainingSpec)]
        similar = get_close_matches(unknown[1], known, 1)
        hint = f": did you mean {similar[0]}?" if similar and not prefix else ""
        return f"unknown field {prefix}{unknown[1]}" + (
            hint or ": see fenka submit --help for the fields"
        )
    path = _PATH.search(why)
    if path is None:
        return f"invalid training: {why}"
    option = "-".join(filter(None, path.groups()))
    value: Any = fields
    for name in filter(None, path.groups()):
        value = value.get(name, "") if isinstance(value, Mapping) else value
    expected = why.partition(",")[0].partition(" - at ")[0]
    kinds = {"`int": "a whole number", "`float": "a number", "`bool": "true or false"}
    kind = next((text for name, text in kinds.items() if f"Expected {name}" in expected), "")
    return f"invalid --{option} {str(value)[:40]!r}: expected {kind or _choices(option)}"


def _choices(option: str) -> str:
    return {
        "clean-task-policy": "Running or All",
        "success-policy": "ChiefWorker or AllWorkers",
        "image-pull-policy": "Always, IfNotPresent or Never",
        "gpu-core-mode": "hard, soft or weight",
        "kind": "mpi, tensorflow or pytorch",
    }.get(option.removeprefix("worker-").removeprefix("ps-"), "another form: see --help")
