"""Where decisions and C objects meet: one thread owns the scheduler and the context."""
