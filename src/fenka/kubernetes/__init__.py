"""Everything that talks to the API server."""
