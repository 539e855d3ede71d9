"""What a user may say a simulated node has."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.hardware.card_spec import CUDA_NEWEST, MAX_CARDS, MODELS, BadSpec, parse_spec
from fenka.hardware.simulated_node import NATIVE


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("T4", ["T4"]),
        ("t4", ["T4"]),
        ("V100-16G*2", ["V100-16G"] * 2),
        ("A100-80G*4,T4", ["A100-80G"] * 4 + ["T4"]),
        (" T4 * 2 , L4 ", ["T4", "T4", "L4"]),
        ("T4*16", ["T4"] * 16),
    ],
)
def test_short_forms(text: str, keys: list[str]) -> None:
    """Models and numbers give cards in order, each with its model's memory and name."""
    cards = parse_spec(text)
    assert [card.model.key for card in cards] == keys
    assert all((c.memory_mib, c.name) == (c.model.memory_mib, c.model.name) for c in cards)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("T5", "no model is called T5: did you mean T4? Known are P4,"),
        ("A100", "no model is called A100: did you mean A100-40G or A100-80G? Known"),
        ("xyzzy", "no model is called xyzzy: Known are P4,"),
        ("T4*0", "T4*0: a node has 1 to 16 cards"),
        ("T4*17", "T4*17: a node has 1 to 16 cards"),
        ("T4*9,L4*8", "a node has 1 to 16 cards, not 17"),
        ("", "cannot read '' in ''"),
        ("T4,,L4", "cannot read '' in 'T4,,L4'"),
        ("T4*two", "cannot read 'T4*two'"),
        ("T4*-1", "cannot read 'T4*-1'"),
        ("/no/such/file", "cannot read /no/such/file: No such file or directory"),
    ],
)
def test_what_means_nothing_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    """The sentence says what was wrong and what would be right."""
    with pytest.raises(BadSpec) as caught:
        parse_spec(text)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_file_says_more(tmp_path: Path) -> None:
    """A file overrides memory, name, UUID, context memory and the driver's version."""
    path = tmp_path / "cards.toml"
    path.write_text("""
        version = 1
        driver_version = "535.309.01"
        cuda_version = "12.2"
        [[card]]
        model = "T4"
        count = 2
        [[card]]
        model = "L4"
        memory_mib = 1000
        name = "My card"
        uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"
        context_mib = 100
    """)
    first, second, last = parse_spec(str(path))
    assert first == second
    assert (first.memory_mib, first.name, first.uuid, first.context_mib) == (
        15079,
        "Tesla T4",
        None,
        0,
    )
    assert (last.memory_mib, last.name, last.context_mib) == (1000, "My card", 100)
    assert last.uuid == "GPU-01234567-89ab-cdef-0123-456789abcdef"
    assert {(c.driver_version, c.cuda_version) for c in (first, last)} == {("535.309.01", "12.2")}


UUID = 'uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"'


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('version = 1\ncolour = "red"\n[[card]]\nmodel = "T4"', "colour is not known: remove it"),
        (
            'version = 1\n[[card]]\nmodel = "T4"\nmemory = 5',
            "memory is not known: did you mean memory_mib?",
        ),
        ('version = 2\n[[card]]\nmodel = "T4"', "version must be 1, not 2"),
        ('[[card]]\nmodel = "T4"', "has no version"),
        ("version = 1\n[[card]]\ncount = 1", "card[0] has no model"),
        (
            'version = 1\n[[card]]\nmodel = "T4"\nmemory_mib = "5"',
            "card[0].memory_mib must be a whole",
        ),
        (
            'version = 1\n[[card]]\nmodel = "T4"\ncount = 99',
            "card[0].count must be a whole number <= ",
        ),
        ('version = 1\n[[card]]\nmodel = "T5"', "no model is called T5"),
        (
            'version = 1\ndriver_version = "new"\n[[card]]\nmodel = "T4"',
            "driver_version must be a text",
        ),
        ("version = 1\ncard = []", "not 0"),
        (f'version = 1\n[[card]]\nmodel = "T4"\ncount = 2\n{UUID}', "one uuid"),
        (f'version = 1\n[[card]]\nmodel = "T4"\n{UUID}\n[[card]]\nmodel = "L4"\n{UUID}', "both"),
        ('version = 1\n[[card]]\nmodel = "T4"\nuuid = "GPU-1"', "GPU-1"),
        ("version =", "cards.toml"),
    ],
)
def test_a_file_is_strict(tmp_path: Path, content: str, named: str) -> None:
    """What is unknown, missing or impossible is named."""
    path = tmp_path / "cards.toml"
    path.write_text(content)
    with pytest.raises(BadSpec) as caught:
        parse_spec(str(path))
    assert named in str(caught.value)


@given(st.lists(st.tuples(st.sampled_from(sorted(MODELS)), st.integers(1, 20)), min_size=1))
def test_cards_are_as_many_as_were_asked_for(items: list[tuple[str, int]]) -> None:
    """Any list of known models is either that many cards in that order, or too many."""
    text = ",".join(f"{key}*{count}" for key, count in items)
    keys = [key for key, count in items for _ in range(count)]
    if len(keys) > MAX_CARDS:
        with pytest.raises(BadSpec, match="1 to 16"):
            parse_spec(text)
    else:
        assert [card.model.key for card in parse_spec(text)] == keys


@given(st.text(st.characters(exclude_characters="/")).filter(lambda text: ".toml" not in text))
def test_any_text_is_cards_or_a_sentence(text: str) -> None:
    """Whatever is typed, nothing but BadSpec is raised."""
    try:
        cards = parse_spec(text)
    except BadSpec:
        return
    assert 1 <= len(cards) <= MAX_CARDS


def test_cuda_version_is_refused_when_the_simulated_driver_lacks_its_functions(
    tmp_path: Path,
) -> None:
    """The newest one is that of the headers, which the driver reports where there is no node."""
    file = tmp_path / "cards.toml"
    file.write_text('version = 1\ncuda_version = "13.6"\n[[card]]\nmodel = "T4"\n')
    with pytest.raises(
        BadSpec, match=r'up to 13\.5: write cuda_version = "13\.5" or an earlier one'
    ):
        parse_spec(str(file))
    major, minor = CUDA_NEWEST
    program = (
        "import ctypes, sys; version = ctypes.c_int(); driver = ctypes.CDLL(sys.argv[1]); "
        "driver.cuDriverGetVersion(ctypes.byref(version)); print(version.value)"
    )
    library = tmp_path / "libcuda.so.1"
    library.write_bytes((NATIVE / library.name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", program, str(library)],
        env={"FENKA_SIMULATED_NODE": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == major * 1000 + minor * 10
