"""MIG instances on demand: records, creation and destruction that survive a kill at any step."""
