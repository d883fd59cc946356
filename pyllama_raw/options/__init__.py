"""Options that users may set: checked once, then frozen."""
