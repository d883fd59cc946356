"""
Memory of sequences: the slots of a context, and what is kept of them elsewhere.

`memory.Memory` is the interface; nothing outside of this folder needs more of it.
"""
