"""Failures of single native calls, tried one after the other: `scripts/fault_matrix.py`."""
