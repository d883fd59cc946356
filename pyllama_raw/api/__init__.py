"""AsyncEngine, Engine and what they give back."""
