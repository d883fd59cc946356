"""Model files with a fault each, and what an engine makes of them."""
