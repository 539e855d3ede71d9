"""A storm over a whole fenka, and an audit of what it did. Nothing here imports fenka.

`make fire` runs both worlds for long; `.ci/run` runs a short, seeded form. See fire/README.md.
"""
