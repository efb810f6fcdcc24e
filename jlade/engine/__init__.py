"""Continuous batching: requests share the rows of one decode state, each from its arrival to the end of its text.

`Engine` runs the loop. Two parts know no model: `scheduler` decides which request has which row, and `prefixes` which
beginnings of texts are kept. `reading` reads the rest of each prompt. `rows` are the programs that read, put a request
into its row and make steps; `job` and `request` are the two sides of a request, the engine's and the caller's.
"""
