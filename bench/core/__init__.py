"""Benchmarks of the core. A package, so that its run.py is not the module that others are."""
