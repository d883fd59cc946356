"""
Options that users may set: checked once, then frozen. The version of this package; pyproject.toml
reads it here.
"""

__version__ = "0.1.0"
