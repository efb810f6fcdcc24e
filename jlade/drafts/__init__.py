"""Drafts for verification from several sources, merged into one tree, for one sequence: arrays in, arrays out.

The paper verifies G separate n-grams of its pool. A tree holds drafts of any source once where they begin alike.

| idea                                                     | from                                 | file           |
|----------------------------------------------------------|--------------------------------------|----------------|
| a tree of drafts in one forward pass, its mask           | SpecInfer, arXiv 2305.09781          | `tree.py`      |
| text after earlier occurrences of the last tokens        | SAM decoding, arXiv 2411.10666       | `suffix.py`    |
| the same in other texts                                  | suffix decoding, arXiv 2411.04975    | `suffix.py`    |
| most probable tokens at the last occurrence of a token   | Token Recycling, arXiv 2408.08696    | `recycling.py` |
| the same after the last two tokens                       | GOOSE, arXiv 2604.02047              | `recycling.py` |
| n-grams of the pool                                      | lookahead decoding, arXiv 2402.02057 | `sources.py`   |
| the record by which sources share the tree               | an addition of jlade's               | `record.py`    |
| drafts ranked by the noise of sampling                   | an addition of jlade's               | `record.py`    |

`sources.py` brings them together.
"""
