"""The algorithm of arXiv 2402.02057 for one sequence: arrays in, arrays out; independent of any model.

Map of the paper:

| paper                                                        | file                                            |
|--------------------------------------------------------------|-------------------------------------------------|
| Section 2, Algorithm 1: Jacobi decoding                      | `jlade/drafts/chain.py`                         |
| Section 3.1: lookahead branch, the 2D window                 | `window.py`                                     |
| Section 3.2: verification branch, the n-gram pool            | `jlade/drafts/pool.py`                          |
| Section 5.4: n-grams of the prompt as reference              | `jlade/drafts/pool.py`, `pool_from_prompt`      |
| Section 3.3, Figure 2: one mask for both branches            | `block.py`                                      |
| Algorithm 2: lookahead decoding, one step                    | `jlade/decoding/step.py`                        |
| Algorithm 3: greedy verification                             | `verification.py`, `verify_by_matching`         |
| Algorithm 4: verification by sampling                        | `verification.py`, `verify_by_rejection`        |
| Section 3.4, Figure 3: lookahead parallelism                 | `division.py`, `jlade/decoding/block.py`        |

`adaptive.py` is an addition: steps become narrower where wide ones do not pay.
"""
