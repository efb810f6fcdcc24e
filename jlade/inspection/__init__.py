"""Compiled programs for any device, without that device: loops, copies, memory and estimated time."""
