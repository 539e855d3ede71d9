"""History of cards and programs, and the ledger of their usage, in an embedded database."""
