"""The runner of the documentation's code blocks."""

from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until
from tools.docs.blocks import PageError, faults, matches, read_page, run_page, steps
from tools.docs.shell import Shell

pytestmark = pytest.mark.process


def page_of(folder: Path, text: str) -> Path:
    """Write a page."""
    path = folder / "page.md"
    path.write_text(text)
    return path


def run(folder: Path, text: str) -> None:
    """Run a page's blocks for a workstation in a shell without fenka."""
    page = read_page(page_of(folder, f"<!-- run: workstation -->\n# Page\n\n{text}"))
    with Shell(folder, {"PATH": "/usr/bin:/bin"}) as shell:
        run_page(page, "workstation", shell)


def test_variables_functions_and_directory_stay_between_blocks(tmp_path: Path) -> None:
    """All blocks of a page run in one shell."""
    run(
        tmp_path,
        "```sh\nx=5; mkdir -p sub; cd sub; say() { echo $x; }\n```\n"
        "```console\n$ say\n5\n$ basename $PWD\nsub\n```\n",
    )


def test_block_fails_when_a_command_in_the_middle_fails(tmp_path: Path) -> None:
    """The commands after it do not run, and the error names the line."""
    with pytest.raises(PageError, match=r"page\.md:4: exit code 3"):
        run(tmp_path, "```sh\necho a\n(exit 3)\ntouch after\n```\n")
    assert not (tmp_path / "after").exists()


def test_page_fails_when_output_differs(tmp_path: Path) -> None:
    """What a page shows is what a program prints."""
    with pytest.raises(PageError, match="expected:\na\n\ngot:\nb"):
        run(tmp_path, "```console\n$ echo b\na\n```\n")


def test_failing_command_is_allowed_only_where_the_page_says_so(tmp_path: Path) -> None:
    """Its exit code is there for the next command."""
    run(tmp_path, "<!-- fails -->\n```console\n$ (exit 4)\n$ echo $?\n4\n```\n")
    with pytest.raises(PageError, match="every command succeeded"):
        run(tmp_path, "<!-- fails -->\n```sh\ntrue\n```\n")


def test_program_in_the_background_ends_with_the_page(tmp_path: Path) -> None:
    """It does not hold up the commands after it."""
    run(tmp_path, "```sh\nsleep 1000 & echo $! > pid\n```\n")
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


def test_block_becomes_a_file_for_the_commands_after_it(tmp_path: Path) -> None:
    """Its text is the file's."""
    run(
        tmp_path,
        "<!-- file: a/train.py -->\n```python\nprint(1)\n```\n```console\n$ cat a/train.py\nprint(1)\n```\n",
    )


def test_hidden_check_runs_and_must_succeed(tmp_path: Path) -> None:
    """Readers do not see it."""
    run(tmp_path, "```sh\ntouch a\n```\n\n<!-- check: test -e a -->\n")
    with pytest.raises(PageError, match="exit code 1"):
        run(tmp_path, "<!-- check: test -e b -->\n")


def test_blocks_of_another_place_are_left_out(tmp_path: Path) -> None:
    """A block's own mark precedes the page's."""
    run(
        tmp_path,
        "<!-- run: cluster -->\n```sh\nexit 9\n```\n\n<!-- not run: no such thing -->\n```sh\nexit 9\n```\n",
    )


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        ("a b", "a    b\n"),
        ("NAME  …  END\n----", "NAME 1 2 3 END\n----------\n"),
        ("first\n…\nlast", "first\n1\n2\n3\nlast\n"),
        ("first\n…\nlast", "first\nlast\n"),
        ("a…", "a\n"),
        ("night  4308MiB  3s  planned in 0.2 s", "night  4308MiB  11m  planned in 12 ms\n"),
    ],
)
def test_wildcards_spaces_and_rules_match(expected: str, printed: str) -> None:
    """`…` is any text in a line, or any lines, and a duration is any duration."""
    assert matches(expected, printed)


@pytest.mark.parametrize(
    ("expected", "printed"),
    [("a", "a\nb\n"), ("a …", "b\n"), ("", "x\n"), ("a.c", "abc\n"), ("3s", "4MiB\n")],
)
def test_other_output_does_not_match(expected: str, printed: str) -> None:
    """Lines may neither be missing nor be more than shown."""
    assert not matches(expected, printed)


def test_commands_of_a_transcript_may_have_several_lines() -> None:
    """A line that ends with a backslash goes on."""
    found = steps("$ a \\\n    b\nout\n$ c\n")
    assert [(step.command, step.output) for step in found] == [("a \\\n    b", "out"), ("c", "")]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```sh\nls\n```\n", "no mark says where"),
        ("```\nls\n```\n", "has no language"),
        ("<!-- run: cluster -->\n```yaml\na: [\n```\n", "is no yaml"),
        ("Text:\n\n    ls\n", "indented code block"),
    ],
)
def test_fault_of_a_page_is_found_before_anything_runs(
    tmp_path: Path, text: str, fault: str
) -> None:
    """Such a page could not be tested."""
    (found,) = faults(read_page(page_of(tmp_path, text)))
    assert fault in found


@pytest.mark.parametrize(
    "text",
    [
        "<!-- run: elsewhere -->\n# Page\n",
        "<!-- run: cluster pace=2 -->\n# Page\n",
        "<!-- not run: -->\n# Page\n",
        "# Page\n\n<!-- fails -->\nText\n",
        "```sh\nls\n",
    ],
)
def test_mark_that_cannot_be_understood_is_an_error(tmp_path: Path, text: str) -> None:
    """A mistyped mark would leave commands out silently."""
    with pytest.raises(PageError):
        read_page(page_of(tmp_path, text))


def test_list_items_may_be_indented(tmp_path: Path) -> None:
    """Text below a list item, and a fence there, is no indented block."""
    text = "1. First\n\n   <!-- run: workstation -->\n   ```sh\n   ls\n   ```\n\n    more\n"
    page = read_page(page_of(tmp_path, text))
    assert [block.text for block in page.blocks] == ["ls\n"]
    assert list(faults(page)) == []
