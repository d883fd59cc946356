"""Scheduling: what a step computes, and what becomes of its result."""
