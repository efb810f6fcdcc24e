"""Tuning: the setting that decodes given prompts fastest on this device."""
