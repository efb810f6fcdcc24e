"""Continuous batching: requests share the rows of one decode state, each from its arrival to the end of its text.

`Engine` runs the loop. Two parts know no model: `scheduler` decides which request has which row, and `prefixes` which
beginnings of texts are kept. `reading` reads prompts from these beginnings, of which `copies` are made. `rows` are the
programs that put a request into its row and make steps. `job` and `request` are the two sides of a request: the
engine's and the caller's.
"""
