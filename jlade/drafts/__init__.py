"""Drafts for verification from several sources, merged into one tree, for one sequence: arrays in, arrays out.

The paper verifies G separate n-grams of its pool: a tree of G chains. With more sources, drafts that begin alike share
their beginning.

| idea                                                     | from                                 | file           |
|----------------------------------------------------------|--------------------------------------|----------------|
| a tree of drafts in one forward pass, its mask           | SpecInfer, arXiv 2305.09781          | `tree.py`      |
| a text that the answer is expected to resemble           | predicted outputs of servers         | `prediction.py`|
| text after earlier occurrences of the last tokens        | SAM decoding, arXiv 2411.10666       | `suffix.py`    |
| the same in other texts                                  | suffix decoding, arXiv 2411.04975    | `suffix.py`    |
| most probable tokens at the last occurrence of a token   | Token Recycling, arXiv 2408.08696    | `recycled.py`  |
| the same after the last two tokens                       | GOOSE, arXiv 2604.02047              | `recycled.py`  |
| runners-up of the current token                          | LogitSpec, arXiv 2507.01449          | `recycled.py`  |
| grades of these tokens, by their probabilities           | an addition of jlade's               | `graded.py`    |
| n-grams of the pool                                      | lookahead decoding, arXiv 2402.02057 | `pool.py`      |
| a chain of guesses: Jacobi decoding                      | the same, Algorithm 1                | `chain.py`     |
| forced tokens of a grammar, with free ones between       | llguidance's fast-forward tokens     | `grammar.py`   |
| the record by which sources share the tree               | an addition of jlade's               | `record.py`    |
| drafts ranked by the noise of sampling                   | an addition of jlade's               | `record.py`    |

`source.py` defines the protocol of a source, and `sources.py` combines them.
"""
