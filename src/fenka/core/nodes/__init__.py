"""Plans which new nodes pending requests need: exact at card level."""
