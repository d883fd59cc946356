"""
Images and sounds of a prompt as plain data, known by their first bytes.

Uploads are a stranger's. What they are, how large they get, and whether they are whole is
found out here in Python, before a decoder in C sees them. Nothing is fetched from anywhere.
"""

from pyllama_raw.media.audio import Audio
from pyllama_raw.media.image import Image
from pyllama_raw.media.limits import MediaLimits

__all__ = ["Audio", "Image", "MediaLimits"]
