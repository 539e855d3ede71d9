"""Reads the file with the daemon's options, which outlives `fenka daemon --stop` and the machine's boot.

/etc/fenka/daemon.toml is the system daemon's, ~/.config/fenka/daemon.toml every other one's. Its keys are the
options of `fenka daemon` without the dashes. An option of the command line replaces the file's.
"""

import tomllib
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any, get_args

import msgspec

from fenka.core.errors import INVALID_INPUT, FenkaError
from fenka.core.evaluate import SCORES
from fenka.dialects.sizes import parse_unit
from fenka.hardware.spec import parse_spec
from fenka.isolation.files import read_regular_file
from fenka.workstation.files import Config
from fenka.workstation.paths import Runtime

MAX_BYTES = 1 << 20


class InvalidOption(FenkaError):
    """An option of the daemon is invalid."""

    exit_code = INVALID_INPUT


def check_policy(policy: str) -> None:
    """Raise InvalidOption if no policy has this name."""
    if policy not in SCORES:
        raise InvalidOption(f"no policy is called {policy}: choose one of {', '.join(SCORES)}")


_CHECKS: dict[str, Callable[[Any], object]] = {
    "simulate": lambda spec: spec and parse_spec(spec),
    "policy": check_policy,
    "unit": parse_unit,
}


def load(runtime: Runtime) -> dict[str, Any]:
    """Return the options that the file of this directory's daemon has; none without a file.

    Raises InvalidOption, with one sentence for each mistake; OSError.
    """
    path = runtime.options
    try:
        text = read_regular_file(path, MAX_BYTES, follow_link=True).decode()
        content = tomllib.loads(text)
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as why:
        raise InvalidOption(f"{path} is no TOML: {why}") from None
    options: dict[str, Any] = {}
    mistakes = list(_read(content, options))
    if mistakes:
        raise InvalidOption("; ".join(f"{path}: {mistake}" for mistake in mistakes))
    return options


def _read(content: dict[str, Any], options: dict[str, Any]) -> Iterator[str]:
    """Add the valid options, and yield a sentence for each other one."""
    fields = {field.name: field for field in msgspec.structs.fields(Config)}
    for name, value in content.items():
        if name not in fields:
            similar = get_close_matches(name, fields)
            hint = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(fields)}"
            yield f"there is no option {name}: {hint}"
            continue
        try:
            option = msgspec.convert(_words(value), get_args(fields[name].type)[0])
            _CHECKS.get(name, lambda _: None)(option)
        except msgspec.ValidationError:
            kind = (
                "a list of words"
                if isinstance(fields[name].default, type(msgspec.NODEFAULT))
                else "a word"
            )
            yield f"{name} must be {kind}, not {value!r}"
        except FenkaError as why:
            yield str(why)
        else:
            options[name] = option


def _words(value: Any) -> Any:
    """Return a list with cards' indices as words: people write 0 and "0"."""
    if not isinstance(value, list):
        return value
    return [str(item) if type(item) is int else item for item in value]
