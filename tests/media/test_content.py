"""Where images and sounds stand in a prompt."""

from base64 import b64encode
from dataclasses import replace

import pytest

from pyllama_raw.errors import BadMedia, InvalidRequest
from pyllama_raw.media import Audio, Image, MediaLimits
from pyllama_raw.media.content import MediaMessages, PromptPiece, list_pieces
from tests.media.files import image_file, pixels, sound_file, wav_file

PNG = image_file("PNG")
URL = "data:image/png;base64," + b64encode(PNG).decode()
SOUND = {"data": b64encode(wav_file()).decode(), "format": "wav"}
LIMITS = MediaLimits(max_parts=32, max_bytes=2**25, max_pixels=2**25, max_seconds=600)


def user(*parts: object) -> dict[str, object]:
    return {"role": "user", "content": list(parts)}


def take(messages: list, limits: MediaLimits = LIMITS) -> MediaMessages:
    return MediaMessages(messages, limits)


def test_parts_of_all_kinds_are_taken_out_in_order(tmp_path):
    """
    OpenAI's parts and our own become markers in the text, and the media are in order.
    """
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    image = Image(pixels(3, 3))

    media = take(
        [
            {"role": "system", "content": "Look."},
            user(
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": URL}},
                {"type": "text", "text": "b"},
                {"type": "input_audio", "input_audio": SOUND},
            ),
            user(
                {"type": "image", "image": path},
                {"type": "image", "image": pixels(3, 3)},
                {"type": "image", "image": image},
                {"type": "audio", "audio": wav_file()},
            ),
        ]
    )

    text = "".join(message["content"] for message in media.messages)
    pieces = media.pieces(text, "m" * len(text))
    assert [piece.text or piece.media for piece in pieces] == [
        "Look.a", 0, "b", *range(1, 6),
    ]  # fmt: skip
    png, sound = Image(PNG), Audio(wav_file())
    assert media.media == [png, sound, png, image, image, sound]


def test_messages_without_media_stay_as_they_are():
    """
    Lists of texts are the business of the template.
    """
    messages = [user({"type": "text", "text": "a"}, {"type": "text", "text": "b"})]

    media = take(messages)

    assert (media.messages, media.media) == (messages, [])
    assert media.pieces("ab", "tm") == [PromptPiece("ab", "tm")]


def test_a_text_cannot_be_a_marker():
    """
    Markers have a name that is new for each chat, and count only where a message is printed.
    """
    first = take([user({"type": "image", "image": Image(PNG)})])
    marker = first.messages[0]["content"]

    second = take(
        [user({"type": "text", "text": marker}, {"type": "image", "image": Image(PNG)})]
    )

    text = second.messages[0]["content"]
    assert [piece.media for piece in second.pieces(text, "m" * len(text))] == [None, 0]
    with pytest.raises(InvalidRequest):
        first.pieces(marker, "t" * len(marker))


@pytest.mark.parametrize("times", [0, 2])
def test_a_template_prints_each_part_once(times):
    """
    A part that the template leaves out or repeats is an error, never another image.
    """
    media = take([user({"type": "image", "image": Image(PNG)})])
    text = media.messages[0]["content"] * times

    with pytest.raises(InvalidRequest, match="prints each part"):
        media.pieces(text, "m" * len(text))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {"url": URL + "!"}},
        {"type": "image_url", "image_url": 7},
        {"type": "image_url"},
        {"type": "image", "image": "/etc/passwd"},
        {"type": "audio", "audio": "/etc/passwd"},
        {"type": "image"},
        {"type": "input_audio", "input_audio": {"data": 7}},
        {"type": "video", "video": b""},
        {"type": ["image"]},
        "image",
        None,
    ],
)
def test_what_is_no_part_is_refused(part):
    """
    Nothing is fetched, a text names no file, and other kinds are refused.
    """
    with pytest.raises(InvalidRequest):
        take([user({"type": "image", "image": Image(PNG)}, part)])


def test_a_list_of_texts_and_media_is_a_prompt():
    """
    A list keeps its order; other things in it are refused.
    """
    image, sound = Image(PNG), Audio(sound_file("MP3"))

    pieces, media = list_pieces(["a", image, "", sound, image, "b"])

    assert [piece.text if piece.media is None else piece.media for piece in pieces] == [
        *("a", 0, "", 1, 2, "b")
    ]
    assert media == [image, sound, image]
    with pytest.raises(InvalidRequest):
        list_pieces(["a", b"b"])


def test_limits_name_the_part():
    """
    Too many parts, bytes, pixels or seconds are refused before anything is decoded.
    """
    image, sound = Image(PNG), Audio(wav_file())
    media = [image, sound]
    LIMITS.check(media)

    with pytest.raises(InvalidRequest, match="at most 1"):
        replace(LIMITS, max_parts=1).check(media)
    for limits, index in (
        (replace(LIMITS, max_bytes=10), 0),
        (replace(LIMITS, max_pixels=1199), 0),
        (replace(LIMITS, max_seconds=0.5), 1),
    ):
        with pytest.raises(BadMedia) as caught:
            limits.check(media)
        assert caught.value.index == index


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": URL + "!" * 9000}}, "bytes, at"),
        ({"type": "input_audio", "input_audio": {"data": "!" * 9000}}, "bytes, at"),
        ({"type": "image", "image": b"?" * 5001}, "5001 bytes, at most 5000"),
        ({"type": "audio", "audio": bytearray(5001)}, "5001 bytes, at most 5000"),
    ],
)
def test_the_length_of_an_upload_is_checked_before_it_is_looked_at(part, reason):
    """
    Of base64 as it is written: what is too long is not decoded, nor found to be none.
    """
    limits = replace(LIMITS, max_bytes=5000)
    assert len(PNG) < 5000
    take([user({"type": "image", "image": PNG})], limits)

    with pytest.raises(BadMedia, match=reason) as caught:
        take([user({"type": "image", "image": Image(PNG)}, part)], limits)

    assert caught.value.index == 1


def test_a_file_is_not_read_if_it_is_too_long(tmp_path):
    """
    Its length is known before.
    """
    path = tmp_path / "long.png"
    with path.open("wb") as file:
        file.truncate(2**40)

    with pytest.raises(BadMedia, match="at most 33554432"):
        take([user({"type": "image", "image": path})])
    with pytest.raises(BadMedia, match="at most 268435456"):
        Image(path)


def test_the_number_of_parts_is_checked_first():
    """
    None of too many images is looked at.
    """
    messages = [user({"type": "image", "image": b"none"}), user({"type": "audio"})]

    with pytest.raises(InvalidRequest, match="2 images and sounds"):
        take(messages, replace(LIMITS, max_parts=1))
