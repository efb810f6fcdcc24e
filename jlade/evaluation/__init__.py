"""Data sets, and measures of texts and of speed, for evaluations."""
