"""Devices: data sheets, meshes, compiled programs, and estimates of time and of the setting of W, N and G."""
