"""Continuous batching: requests share the rows of one decode state, each from its arrival to the end of its text.

`Engine` runs the loop; `scheduler` decides which request has which row and knows no model; `rows` are the programs that
put a request into its row and make steps; `job` and `request` are the two sides of a request, the engine's and the
caller's.
"""
