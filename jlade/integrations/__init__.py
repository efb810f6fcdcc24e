"""jlade within other people's code: one module for each of their packages, which it needs and jlade does not."""
