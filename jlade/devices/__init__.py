"""Devices: data sheets, meshes, compiled programs, and estimates of time and of the best setting."""
