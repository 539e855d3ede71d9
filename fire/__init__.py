"""Inject faults into a complete fenka installation and audit the result. Nothing here imports fenka.

`make fire` runs a long form on a workstation and a cluster; `.ci/run` a short one. See fire/README.md.
"""
