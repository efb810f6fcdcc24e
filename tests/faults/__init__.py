"""Faults that the suite must find: each is put into a copy of the package, where the tests named for it must fail.

`make faults` runs them; `catalogue.py` has the list. The suite itself only checks that each of them still applies.
"""
