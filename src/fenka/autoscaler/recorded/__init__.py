"""A cluster as one file: written for bug reports, read for what-ifs."""
