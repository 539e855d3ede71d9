"""YAML with JSON's types: what is read, and what is refused."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.formats.documents import MAX_BYTES, InvalidYaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing", None),
        ("a: [1, -2, 3.5, 1e3, .5, 7.]", {"a": [1, -2, 3.5, 1000.0, 0.5, 7.0]}),
        ("a: {b: true, c: null, d: ~, e: }", {"a": {"b": True, "c": None, "d": None, "e": None}}),
        # What YAML 1.1 reads as booleans, numbers of base 60 or 8, dates and merges is text.
        ("[no, on, 12:30, 2026-01-01, 0x10]", ["no", "on", "12:30", "2026-01-01", "0x10"]),
        ("[.nan, .inf, 1e999]", [".nan", ".inf", "1e999"]),
        ("<<: {a: 1}", {"<<": {"a": 1}}),
        ("010", 10),
        ("1: a", {"1": "a"}),
        ("a: '1'\nb: \"true\"\nc: |\n  1\n", {"a": "1", "b": "true", "c": "1\n"}),
        ("9" * 19, "9" * 19),
        ("[]", []),
        ("---\na: 1\n...\n", {"a": 1}),
    ],
)  # fmt: skip
def test_value_has_jsons_types(text: str, value: Any) -> None:
    """As YAML 1.2 has it."""
    assert parse_yaml(text.encode()) == value


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"\xff\xfe", "is no text in UTF-8: save it as UTF-8"),
        (b"a: [", "is no YAML: line 1, column 5: "),
        (b"a: b: c", "is no YAML: line 1, column 5: mapping values are not allowed here"),
        (b"a: \x07", "is no YAML: unacceptable character #x0007"),
        (b"a: 1\na: 2", "has 'a' twice in line 2: remove one"),
        (b"a: &x [1]\nb: *x", "has an anchor or alias in line 1: write the value itself"),
        (b"a: *x", "has an anchor or alias in line 1: write the value itself"),
        (b"a: !!python/object:os.system x", "has a tag in line 1: remove 'tag:yaml.org,2002:python/object:o"),
        (b"a: !!binary x", "has a tag in line 1: remove 'tag:yaml.org,2002:binary'"),
        (b"a: 1\n---\nb: 2", "has a second document in line 2: remove it"),
        (b"? [a]\n: 1", "has a key in line 1 that is no plain text: write a name"),
        (b"? *a\n: 1", "has a key in line 1 that is no plain text: write a name"),
        (b"&x a: 1", "has a key in line 1 that is no plain text: write a name"),
        (b"[" * 100_000, "is nested deeper than 20 levels in line 1: flatten it"),
        (b"{a: " * 50_000, "is nested deeper than 20 levels in line 1: flatten it"),
        (b"- " * 50_000, "is nested deeper than 20 levels in line 1: flatten it"),
        (b"#" * (MAX_BYTES + 1), "has more than 262144 bytes: leave out what is not needed"),
        (b"%YAML 3.0\n---\na: 1", "is no YAML: line 1, column 1: found incompatible YAML document"),
    ],
)  # fmt: skip
def test_text_is_refused_with_the_end_of_a_sentence_when_it_is_hostile(
    text: bytes, sentence: str
) -> None:
    """Before anything large is made of it."""
    with pytest.raises(InvalidYaml) as why:
        parse_yaml(text)
    assert str(why.value).startswith(sentence)


@given(st.one_of(st.binary(max_size=60), st.text("ab:[]{}-,&*!?|>'\"\n #%@`", max_size=40)))
def test_text_raises_nothing_else_whatever_it_is(data: bytes | str) -> None:
    """No exception of pyyaml escapes."""
    with contextlib.suppress(InvalidYaml):
        parse_yaml(data if isinstance(data, bytes) else data.encode())
