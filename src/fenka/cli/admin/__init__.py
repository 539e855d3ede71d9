"""Commands for operators, and the programs of a cluster."""
