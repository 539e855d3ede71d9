"""The program on every GPU node: device plugin, leases, health, usage."""
