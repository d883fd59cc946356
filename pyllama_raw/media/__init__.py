"""
Images and sounds of a prompt as plain data, which Pillow and libsndfile open and decode.

Uploads are a stranger's. Their number, bytes and sizes are limited before anything is
decoded, and what they are is one of a few formats. Nothing is fetched from anywhere.
"""

from pyllama_raw.media.content import Audio, Image, MediaLimits

__all__ = ["Audio", "Image", "MediaLimits"]
