"""Topology: the connections of cards inside a node, and the domains that nodes are in."""
