"""Decisions meet C objects here: one thread owns the scheduler and the context."""
