"""Escapes what a terminal would not print, for screens and logs."""


def escape(text: str) -> str:
    """Return the text with each unprintable character escaped, as `\\x1b`.

    Names, commands and messages come from other users, and terminals execute escape sequences.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
