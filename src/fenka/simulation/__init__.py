"""Replays traces of pods on paper, over the same core that runs live."""
