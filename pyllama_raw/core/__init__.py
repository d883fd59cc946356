"""
Decisions, in pure Python: no thread, clock, file, numpy or C.

Time and results come in as arguments, so a test can replay any history.
"""
