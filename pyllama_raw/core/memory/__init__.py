"""
Memory of sequences: the slots of a context, and what is saved of them elsewhere.

Read `memory` first, which is the interface. `placement` is the rule that chooses what a
sequence starts from. `slots` counts what the context holds. `tiers` saves and loads, by
means of `cache`, `snapshots` and `radix_tree`.
"""
