"""The laboratory: benchmarks, simulation, tuning and pictures; nothing else imports it."""
