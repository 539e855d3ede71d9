"""Test how pods' answers are read: as in Prometheus' text format, whatever the blocks, and within bounds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenka.metrics_adapter.exposition import (
    MAX_LINE,
    MAX_SERIES,
    InvalidExposition,
    LabelValues,
    SumReader,
)

NAME = "vllm:num_requests_waiting"


def sums(text: str | bytes, labels: LabelValues = ()) -> dict[LabelValues, float]:
    """Return the sums of NAME."""
    reader = SumReader({NAME: labels})
    reader.feed(text if isinstance(text, bytes) else text.encode())
    reader.finish()
    return reader.sums[NAME]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{NAME} 3\n", 3),
        (f"{NAME} 3.5e1\r\n", 35),
        (f'{NAME}{{model="a"}} 1\n{NAME}{{model="b"}} 2\n', 1 + 2),
        (f'{NAME}{{model="a}} 9 {{\\"\\\\",}} 4 1700000000000\n', 4),
        (f"{NAME} \t 5 \n", 5),
        (f"# TYPE {NAME} gauge\n{NAME} 6\n", 6),
        (f"# TYPE {NAME}_total counter\n{NAME}_total 1\n{NAME} 7\n{NAME}er 8\n", 7),
        (f"x 1\nx{NAME} 2\n# {NAME} 3\n {NAME} 4\n{NAME} 0\n", 0),
        (f"{NAME} {1e12}\n", 1e12),
    ],
)
def test_value_is_the_sum_of_the_metrics_series(text: str, expected: float) -> None:
    """Other metrics, comments and timestamps are not read."""
    assert sums(text) == {(): expected}


def test_metric_is_absent_when_no_line_has_it() -> None:
    """The caller makes that an error, since 0 would end replicas."""
    assert sums("other 1\n") == {}
    assert sums("") == {}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"{NAME} NaN\n", "has 'NaN' as"),
        (f"{NAME} +Inf\n", r"has '\+Inf' as"),
        (f"{NAME} -1\n", "has '-1' as"),
        (f"{NAME} 1e308\n", "has '1e308' as"),
        (f"{NAME} 1e999999\n", "has '1e999999' as"),
        (f"{NAME} 1_000\n", "has '1_000' as"),
        (f"{NAME} 0x10\n", "has '0x10' as"),
        (f"{NAME} ١\n", "has '.*' as"),
        (f"{NAME} {'1' * 65}\n", "not Prometheus' text format"),
        (f"{NAME} \n", "not Prometheus' text format"),
        (f"{NAME} {' ' * 60000}\n", "not Prometheus' text format"),
        (f'{NAME}{{a="b"}}\n', "not Prometheus' text format"),
        (f'{NAME}{{a="b"}} 1 2 3\n', "not Prometheus' text format"),
        (f'{NAME}{{a="b}} 1\n', "not Prometheus' text format"),
        (f"{NAME}{{{'a' * 60000}}} x\n", "has 'x' as"),
        (f"# TYPE {NAME} counter\n{NAME} 1\n", "as a counter, expected a gauge"),
        (f"{NAME} 1\n{NAME} 2", "middle of a line"),
        ("x" * (MAX_LINE + 1), "a line of more than 64 KiB"),
        (f"{NAME} 1\n" * (MAX_SERIES + 1), "more than 1000 series"),
    ],
)
def test_answer_is_refused_when_its_value_cannot_be_used(text: str, sentence: str) -> None:
    """The sentence never repeats more than a few characters."""
    with pytest.raises(InvalidExposition, match=sentence) as caught:
        sums(text)
    assert len(str(caught.value)) < 150


def test_sums_are_by_the_labels_asked_for() -> None:
    """Labels may have any order, and escapes."""
    text = f'{NAME}{{b="2",a="1"}} 1\n{NAME}{{a="1",c="3" , b="2",}} 2\n{NAME}{{a="\\"\\\\",b="ä"}} 4\n'
    assert sums(text, ("a", "b")) == {("1", "2"): 3, ('"\\', "ä"): 4}


@pytest.mark.parametrize(
    "labels",
    ['a="1"', "", f'a="1",b="{"x" * 254}"', "a" * 60000, '1="2",a="1",b="2"', b'a="1",b="\xff"'],
)
def test_answer_is_refused_when_labels_are_missing_or_long(labels: str | bytes) -> None:
    """A gateway of a tenant may send anything as well."""
    encoded = labels if isinstance(labels, bytes) else labels.encode()
    with pytest.raises(InvalidExposition, match="label"):
        sums(NAME.encode() + b"{" + encoded + b"} 1\n", ("a", "b"))


TEXTS = st.lists(
    st.one_of(
        st.integers(0, 10**6).map(lambda value: f"{NAME} {value}"),
        st.integers(0, 9).map(lambda value: f'{NAME}{{model="m{value}"}} {value}'),
        st.text(st.characters(blacklist_characters="\n", codec="utf-8"), max_size=30).map(
            lambda text: f"#{text}"
        ),
        st.just("other_metric 3"),
    )
)


@given(TEXTS, st.lists(st.integers(0, 2000)))
def test_sum_is_the_same_when_the_answer_comes_in_other_blocks(
    lines: list[str], cuts: list[int]
) -> None:
    """Packets end anywhere."""
    text = "".join(f"{line}\n" for line in lines).encode()
    reader = SumReader({NAME: ()})
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in pairwise(edges):
        reader.feed(text[start:end])
    reader.finish()
    values = [float(line.split()[-1]) for line in lines if line.startswith(NAME)]
    assert reader.sums[NAME] == ({(): sum(values)} if values else {})


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    """Nothing but InvalidExposition is raised, and no sum is out of range."""
    reader = SumReader({NAME: ("a",), "x": ()})
    try:
        reader.feed(b"x " + body + b"\n" + NAME.encode() + b'{a="' + body + b"\n")
        reader.finish()
    except InvalidExposition:
        return
    assert all(value >= 0 for found in reader.sums.values() for value in found.values())
