"""What users may set: checked once, then frozen."""
