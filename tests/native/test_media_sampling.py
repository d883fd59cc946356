"""What samples an output sees the text of a prompt, never its images or sounds."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest

from pyllama_raw import Engine, SamplingParams
from pyllama_raw.errors import InvalidSampling
from tests.api.media_engines import opened, picture
from tests.native.media_player import MediaPlayer, Prompt, playing_media
from tests.native.media_support import text_tokens

pytestmark = pytest.mark.native

BIAS = 60.0  # more than logits of a tiny model differ by


@pytest.fixture(scope="module")
def llava() -> Iterator[Engine]:
    with opened("llava") as engine:
        yield engine


def token(engine: Engine, text: str) -> int:
    return engine.tokenize(text)[-1]


@pytest.mark.parametrize(
    "penalty", ["repeat_penalty", "presence_penalty", "frequency_penalty"]
)
def test_penalties_look_back_over_text_only(llava, penalty):
    """
    The last two tokens are those on both sides of an image, whose rows do not count.
    """
    wanted = token(llava, "x")
    options = {"max_tokens": 1, "temperature": 0, "logit_bias": {wanted: BIAS}}
    params = [
        SamplingParams(**options),
        SamplingParams(**options, penalty_last_n=1, **{penalty: 100}),
        SamplingParams(**options, penalty_last_n=2, **{penalty: 100}),
    ]

    found = [llava.complete(["x", picture(), "a"], p).token_ids[0] for p in params]

    assert [number == wanted for number in found] == [True, True, False]


def test_dry_joins_the_text_on_both_sides():
    """
    A repeat that an image interrupts is one, as for llama-server.
    """
    with playing_media("llava") as player:
        image = player.prompt()
        first, second, third = text_tokens(player.context.model, "xyz")

        def play(**dry: float) -> int:
            number = play_tokens(
                player,
                image,
                [first, *image_tokens(image), second, third, first, second],
                SamplingParams(
                    temperature=0, seed=0, logit_bias={third: BIAS}, max_tokens=1, **dry
                ),
            )
            return player.tokens[number][0]

        found = [play(), play(dry_multiplier=100)]

    assert [number == third for number in found] == [True, False]


def image_tokens(prompt: Prompt) -> array[int]:
    [span] = prompt.spans
    return prompt.tokens[span.start : span.stop]


def play_tokens(
    player: MediaPlayer, image: Prompt, tokens: list[int], params: SamplingParams
) -> int:
    """*tokens*, in which the rows of *image* are second."""
    [span] = image.spans
    moved = span._replace(start=1, stop=1 + span.stop - span.start)
    prompt = Prompt(array("i", tokens), (moved,), image.payloads, image.part)
    return player.play(prompt, 1, sampling=params)


def test_constraints_and_stop_strings_see_the_output_only(llava):
    """
    A grammar begins behind the prompt; what is in the prompt is no stop string.
    """
    prompt = ["x stop ", picture(), "stop"]
    wanted = token(llava, "s")

    said = llava.complete(prompt, SamplingParams(grammar='root ::= "stop"')).text
    params = SamplingParams(
        max_tokens=4, temperature=0, stop=["ss"], logit_bias={wanted: BIAS}
    )
    stopped = llava.complete(prompt, params)

    assert said == "stop"
    assert (stopped.text, stopped.finish_reason) == ("", "stop")


def test_nobody_scores_a_prompt_with_images(llava):
    """
    Rows have no probability, so there would be holes; it is refused before any work.
    """
    with pytest.raises(InvalidSampling, match="None with images"):
        llava.score(["a", picture(), "b"])

    assert (
        llava.complete("a", SamplingParams(max_tokens=1)).usage.completion_tokens == 1
    )
