"""Pillow, libsndfile and soxr are an extra: they are imported when a file needs them."""

import subprocess
import sys

import numpy as np
import pytest

from pyllama_raw.errors import Unsupported
from pyllama_raw.media import Audio, Image
from tests.media.files import image_file, pixels, tone, wav_file

LIBRARIES = ("PIL", "soundfile", "soxr")


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("PIL.Image", lambda: Image(image_file("PNG"))),
        ("soundfile", lambda: Audio(wav_file())),
        ("soxr", lambda: Audio(tone(9), 8000).samples(16000)),
    ],
)
def test_without_a_library_the_extra_is_named(monkeypatch, module, use):
    """
    Files of images and sounds, and sounds of another rate, are refused then.
    """
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(Unsupported, match=r"pip install .pyllama_raw\[media\]"):
        use()


def test_pixels_and_samples_need_no_library():
    """
    Nothing of the extra is imported for what is decoded, nor with the package.
    """
    code = f"""
import sys
import numpy as np
from pyllama_raw.media import Audio, Image
Image(np.zeros((2, 2, 3), np.uint8)).pixels()
Audio(np.zeros(9, np.float32), 16000).samples(16000)
print([name for name in {LIBRARIES} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)

    assert done.stdout == b"[]\n"
    assert Image(pixels(2, 3)).pixels() == pixels(2, 3).tobytes()
    assert np.array_equal(Audio(tone(9), 8000).samples(8000), tone(9))
