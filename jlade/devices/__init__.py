"""Devices: their data sheets, and the setting of W, N and G that suits them."""
