"""The embedded default: a daemon that leases this machine's cards, and its clients."""
