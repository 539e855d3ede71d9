"""The names that users write, to and from core requests."""
