"""MIG as values: the profiles of card models, the layouts that they allow, and plans that change layouts."""
