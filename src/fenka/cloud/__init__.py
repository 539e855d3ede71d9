"""Launches and ends nodes at cloud providers behind one port."""
