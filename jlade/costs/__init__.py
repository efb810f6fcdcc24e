"""What a step costs, and what follows from it: "auto", the search of `jlade.tune`, and `jlade.plan`.

`devices` has the data sheets, and `attached` says which devices JAX does not see. `estimate` turns work into seconds;
`work` has that of a step on each device of a mesh. `search` measures settings with `measurement`, and `tuning` is its
result. `choice` stores it and takes a setting for "auto", `learned` what calls teach of its widths. `plan` compares
meshes, by the tokens per step of `settings`, the list of those to choose among.
"""
