"""Tuning: the W, N and G that decode given prompts fastest on this device."""
