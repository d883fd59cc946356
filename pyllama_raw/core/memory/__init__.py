"""
What the slots of a context hold, and what is kept of it elsewhere.

`memory.Memory` is the interface; nothing outside of this folder needs more of it.
"""
