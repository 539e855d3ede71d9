"""Test the figures and the drawing of a recorded peak."""

from typing import Any
from xml.etree import ElementTree

from bench.plot import draw, stairs
from e2e.scenarios.serving.plot import Figures


def record() -> dict[str, Any]:
    """Return 20 s with 10 ms, then a peak of 10 s: 4 s with 1 s, 6 s with 20 ms; then 10 ms again."""
    latencies = [0.010] * 20 + [1.0] * 4 + [0.020] * 6 + [0.010] * 10
    requests = [
        [1000.0 + second + tenth / 10, latency, 200, 0.0]
        for second, latency in enumerate(latencies)
        for tenth in range(10)
    ]
    steps = [{"at": 1000.0 + second, "step": second, "attempt": 0} for second in range(40)]
    return {
        "phases": [[10, 20], [10, 10], [10, 10]],
        "requests": requests,
        "replicas": [[990.0, 1], [1024.0, 3], [1035.0, 1]],
        "steps": [steps, steps],
    }


def test_figures_are_those_of_the_phases() -> None:
    """20 ms are less than three times 10 ms, and 1 s is not."""
    figures = Figures.of(record())
    assert figures.marks == (20, 30)
    assert figures.idle_ms == 10
    assert figures.recovery() == (4, 1)
    assert max(value for _, value in figures.latency()) == 1000


def test_stairs_keep_each_value_until_the_next() -> None:
    """The last value lasts until the end."""
    assert stairs([(0, 1), (5, 3)], 9) == [(0, 1), (5, 1), (5, 3), (9, 3)]


def test_drawing_has_a_line_for_each_series() -> None:
    """Load, replicas, latency, and two members of the training."""
    svg = draw(Figures.of(record()).panels(40), (20, 30), 40)
    lines = list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 5
    replicas = lines[1].attrib["points"].split()
    assert replicas[0].startswith("90.0,")
    assert len(replicas) == 6
