"""Formats of files and of values that people write."""
