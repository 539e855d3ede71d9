"""Plots of replays, as SVG or PNG by the file's name.

matplotlib is an extra. It draws without a display.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

SUFFIXES = (".svg", ".png")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram.

    Attributes:
        title: what stands above it.
        x, y: labels of the axes.
        lines: points by the name of the line. Equal points are drawn over each other.
        steps: whether a value holds up to its point, instead of changing evenly.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, Points]
    steps: bool = False


def check_writable(file: Path) -> None:
    """Find out before a long replay that its plots cannot be written.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        OSError: if the file cannot be written.
    """
    import_module("matplotlib")
    file.open("ab").close()


def save(panels: Sequence[Panel], file: Path) -> None:
    """Draw panels from top to bottom, and write them. The same panels give the same file.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        OSError: if the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Names of paths in an SVG are made of this, not of chance.
    with rc_context({"svg.hashsalt": "fenka", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 3 * len(panels)), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, panel in zip(
            figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True
        ):
            for name, points in panel.lines.items():
                x, y = [at for at, _ in points], [value for _, value in points]
                axes.plot(x, y, label=name, drawstyle="steps-pre" if panel.steps else "default")
            axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            if len(panel.lines) > 1:
                axes.legend()
        kind = file.suffix.removeprefix(".")
        metadata = {"Date": None} if kind == "svg" else {}
        figure.savefig(file, format=kind, metadata=metadata)
