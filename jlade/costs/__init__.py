"""What a step costs, and what follows from it: "auto", the search of `jlade.tune`, and `jlade.plan`.

`devices` has a data sheet for each device, and says which of this machine JAX does not see. `estimate` turns operations
into seconds, among them those of `work` on each device of a mesh, which also counts bytes. `settings` are those to
choose among. `search` measures them with `measurement`, and `tuning` is the result. `choice` stores it, and takes a
setting for "auto"; `learned` has what calls teach of its widths. `plan` compares meshes.
"""
