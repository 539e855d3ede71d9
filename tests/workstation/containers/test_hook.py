"""The hook itself: it reads what a runtime gives it, and never the wrong member of it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workstation.containers.runtime import HOOK


def hook(state: bytes, *words: str) -> str:
    """Run the hook without a daemon. Return its sentence."""
    done = subprocess.run(
        [HOOK, *(words or ("slice=1",))],
        input=state,
        capture_output=True,
        check=False,
        env={"FENKA_RUNTIME": "/nowhere"},
    )
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"fenka: ")
    assert done.stderr.endswith(b"\n")
    return done.stderr.decode().removeprefix("fenka: ").strip()


NO_BUNDLE = "the runtime names no bundle on standard input"
FOUND = "the bundle's config.json cannot be opened"


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"bundle": "/nowhere"}, FOUND),
        ({"a": {"b": [1, {"bundle": "/tmp"}]}, "bundle": "/nowhere"}, FOUND),
        ({"annotations": {"bundle": "/tmp"}}, NO_BUNDLE),
        ({"a": '"bundle":"/tmp"'}, NO_BUNDLE),
        ({"a": '\\\\",\\"bundle\\":'}, NO_BUNDLE),
        ({"bundle": 1}, NO_BUNDLE),
        ({"bundle": "/" + "x" * 5000}, NO_BUNDLE),
        ([{"bundle": "/nowhere"}], NO_BUNDLE),
        ("bundle", NO_BUNDLE),
    ],
)
def test_only_the_states_own_members_count(state: Any, sentence: str) -> None:
    """Annotations may have any key, and any text."""
    assert hook(json.dumps(state).encode()).startswith(sentence)
    assert hook(json.dumps(state, indent=3).encode()).startswith(sentence)


@pytest.mark.parametrize(
    "state",
    [
        *(b"", b"{", b'{"', b'{"a', b'{"a"', b'{"a":', b'{"a":"', b'{"a":[', b"[" * 99_999),
        *(
            b"{" * 99_999,
            b'{"a":}',
            b'{"bundle":"\\u002f"}',
            b'{"bundle":"',
            b"\0",
            b'{"a":1 "bundle":"/"}',
        ),
    ],
)
def test_damaged_state_is_no_state(state: bytes) -> None:
    """Whatever its depth."""
    assert hook(state).startswith(NO_BUNDLE)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:\\ab1 ', max_size=60).map(str.encode))
def test_any_state_ends_in_a_sentence(state: bytes) -> None:
    """And never in a signal."""
    assert hook(state)


def test_process_that_is_gone_is_named(tmp_path: Path) -> None:
    """Before any daemon is asked."""
    (tmp_path / "config.json").write_text("{}")
    for pid in (0, -1, 4194305, "1", 10**12):
        state = json.dumps({"pid": pid, "bundle": str(tmp_path)}).encode()
        assert hook(state).startswith("the container's process is gone")


def test_device_must_be_named() -> None:
    """The CDI file names it."""
    done = subprocess.run([HOOK], input=b"", capture_output=True, check=False)
    assert b"which device?" in done.stderr
