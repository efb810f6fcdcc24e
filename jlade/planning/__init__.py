"""Planning for many devices: the work of a step on each mesh, its memory and its estimated time."""
