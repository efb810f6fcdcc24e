"""Devices: which one holds a model, and its properties."""
