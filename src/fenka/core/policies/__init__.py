"""Placement policies: how nodes and cards that fit are ordered, as tables of small functions."""
