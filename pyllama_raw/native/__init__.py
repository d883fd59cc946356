"""Owned C objects, one class a file, no policy. Nothing here is loaded by importing it."""
