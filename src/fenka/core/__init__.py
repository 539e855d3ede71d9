"""Decides: values in, values out."""
