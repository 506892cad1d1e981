"""Devices: the mesh and what is sharded along its axes."""
