"""Tiny random models: one file for each memory class libllama has."""
