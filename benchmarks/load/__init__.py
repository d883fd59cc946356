"""Workloads, the client that sends them, and what is made of its times."""
