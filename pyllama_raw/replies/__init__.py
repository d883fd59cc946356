"""
Replies of models, taken apart: reasoning, content and calls of tools.

Everything here is about text. It runs on recorded outputs, without an engine.
"""
