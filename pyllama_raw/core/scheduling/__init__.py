"""What a step computes, and what becomes of its result."""
