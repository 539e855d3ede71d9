"""Makes a release: ``python -m deploy.release`` writes all that is published into dist/.

A module makes one kind of artifact. Its step is a function that takes a `Release` and returns the files that
it wrote; `__main__` has the table of the steps.
"""
