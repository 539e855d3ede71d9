"""Renders trainings as objects of Kubernetes: pure functions from a spec to manifests.

`render.py` is the entry. One root object (a Job or a JobSet) owns all others.
"""
