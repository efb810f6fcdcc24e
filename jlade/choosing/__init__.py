"""Choosing a setting: the data sheet of a device, the estimate from it, and settings stored by `jlade.tune`."""
