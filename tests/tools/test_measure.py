"""What `make measure` counts in a small tree."""

from pathlib import Path

from tools.measure import SUBJECT_LINES, long_sentences, measure, unnamed_things

SOURCE = '''"""A module.

Two lines of text."""

import os
from a import (
    b,
)

# A comment.


class Card:
    """A card."""

    def share(self, each: int) -> int:
        """Return it."""
        for it in range(3):
            print(os.sep, it)  # here
        return b
'''


def test_code_lines_are_those_without_docstrings_comments_and_empty_lines(tmp_path: Path) -> None:
    """What protoc makes is not counted at all."""
    (tmp_path / "cards").mkdir()
    for name in ("card.py", "cards/card.py", "cards/card_pb2.py"):
        (tmp_path / name).write_text(SOURCE)
    counted = measure(tmp_path)
    # 4 lines of imports, the class, and 4 of the function; twice.
    assert (counted.code_lines, counted.import_lines) == (2 * 9, 2 * 4)
    assert counted.folders == {".": 1, "cards": 1}
    assert (counted.modules["card"], counted.classes["Card"]) == (2, 2)
    assert set(counted.functions.values()) == {4}
    assert counted.placeholders == 2 * 2


def test_long_sentences_have_more_than_thirty_words() -> None:
    """Entries of lists are sentences of their own."""
    thirty = "word " * 29 + "end."
    assert long_sentences(f"{thirty} {thirty}") == 0
    assert long_sentences(f"One more {thirty}") == 1
    assert long_sentences("A list:\n\n" + "\n".join(f"- {thirty[:100]}" for _ in range(3))) == 0


def test_sentences_that_do_not_name_their_thing_are_counted() -> None:
    """A question may begin with "what", and a sentence may have these words within."""
    assert unnamed_things("What waits is served. Whoever waits\nis served. It waits so long.") == 3
    assert unnamed_things("Two of the same: they are equal. They wait so long as it runs.") == 0
    assert unnamed_things("What waits? The request has what it needs.") == 0


def test_module_has_several_subjects_when_large_parts_name_nothing_of_each_other(
    tmp_path: Path,
) -> None:
    """A small helper is no subject. A function that calls both makes one subject of them."""
    lines = "\n".join(f"    print({n})" for n in range(SUBJECT_LINES - 1))
    one, two = f"def one():\n{lines}\n", f"class Two:\n{lines}\n"
    both = "def both():\n    return one(), Two()\n"
    sources = {"one": one + both[:12] + "    pass\n", "two": one + two, "joined": one + two + both}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(f"LIMIT = 1\n{source}")
    counted = measure(tmp_path)
    assert counted.several_subjects == ["two.py"]
    assert counted.class_lines == {
        "two.py:42 Two": SUBJECT_LINES,
        "joined.py:42 Two": SUBJECT_LINES,
    }
