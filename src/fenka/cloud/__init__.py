"""Clouds that launch and end nodes, behind one port."""
