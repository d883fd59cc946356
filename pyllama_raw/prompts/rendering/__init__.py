"""Chat templates, run in a process of their own: they are programs of strangers."""
