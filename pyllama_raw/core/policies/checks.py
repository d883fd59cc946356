"""Checks of what a policy answers; anything else is a fault of the policy."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pyllama_raw.errors import shown

MAX_NUMBERS = 8  # in a key
MAX_BITS = 64  # of a whole number in a key: longer ones take long to compare

# Plain ones, because a class of the policy could compare as it likes.
NUMBERS = (int, float, bool)


class PolicyAnswerError(ValueError):
    """A hook returned what it must not."""

    def __init__(self, answer: object, allowed: str) -> None:
        super().__init__(f"returned {shown(answer)}: return {allowed}")


def checked_key(key: object) -> tuple[float, ...]:
    """*key* as plain numbers that can be compared. Raises PolicyAnswerError."""
    if type(key) in NUMBERS:
        key = (key,)
    if type(key) is tuple and 1 <= len(key) <= MAX_NUMBERS and all(map(_is_fine, key)):
        return key
    allowed = f"a number, or a tuple of 1 to {MAX_NUMBERS} numbers, none of them NaN"
    raise PolicyAnswerError(key, allowed)


def _is_fine(number: object) -> bool:
    if type(number) is float:
        return number == number  # not so for NaN  # noqa: PLR0124
    return type(number) in NUMBERS and int.bit_length(number) <= MAX_BITS  # type: ignore[arg-type]


def checked_quota(quota: object, request_ids: Collection[int]) -> dict[int, int]:
    """The tokens of those of *request_ids* that *quota* limits."""
    if not isinstance(quota, Mapping):
        raise PolicyAnswerError(quota, "a mapping of request_id to tokens")
    limits = {}
    for request_id in request_ids:
        n_tokens = quota.get(request_id)
        if n_tokens is not None:
            if type(n_tokens) is not int:
                raise PolicyAnswerError(n_tokens, "whole numbers of tokens")
            limits[request_id] = n_tokens
    return limits
