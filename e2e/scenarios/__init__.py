"""Test on a real cluster what users do; each file covers one article or one promise of the documents."""
