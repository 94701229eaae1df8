"""The functions a training step is made of, traced into canonical graphs. Knows models, but no target."""
