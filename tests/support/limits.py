"""The one limit of what tests wait for: a busy machine is no failure, and a hang is one."""

LIMIT_S = 120.0  # below pytest's own limit, which ends the process
