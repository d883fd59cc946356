"""Vectors of texts: a scheduler of their own, for the same executors and drivers."""
