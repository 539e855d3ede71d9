"""`fenka docker run`: options of fenka's become the device and variables, and all others are the engine's."""

import pytest

from fenka.cli.containers.engines import translate
from fenka.cli.error_report import UserError

ANY = ["--device", "fenka.io/slice=any"]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (
            "run --gpu-mem 4 --rm IMAGE python --gpu-mem 9",
            ["run", *ANY, "-e", "FENKA_GPU_MEM=4", "--rm", "IMAGE", "python", "--gpu-mem", "9"],
        ),
        (
            "run --gpu-mem=6GiB --gpu-core=30 --no-wait -it IMAGE",
            [
                *("run", *ANY, "-e", "FENKA_WAIT=refuse", "-e", "FENKA_GPU_MEM=6GiB"),
                *("-e", "FENKA_GPU_CORE=30", "-it", "IMAGE"),
            ],
        ),
        ("create --whole-cards 2 IMAGE", ["create", "--device", "fenka.io/card=2", "IMAGE"]),
    ],
)
def test_options_before_the_engines_are_translated(words: str, command: list[str]) -> None:
    """The program in the container may have options of the same names."""
    assert translate("docker", words.split()) == ["docker", *command]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("run --rm --gpu-mem 4 IMAGE", "fenka's options come before docker's"),
        ("run", "no amount given: use `fenka docker run --gpu-mem 4`"),
        ("run --gpu-mem", "--gpu-mem needs a value"),
        ("ps", "fenka docker knows run and create, not ps: use `docker ps` itself"),
    ],
)
def test_what_is_not_understood_gets_a_sentence(words: str, sentence: str) -> None:
    """Docker would say that it does not know the option, or would start without a slice."""
    with pytest.raises(UserError) as why:
        translate("docker", words.split())
    assert sentence in str(why.value)
