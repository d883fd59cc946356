"""Labels of a text: the likelihood of each as its continuation, as a part of that of all."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Literal, get_args

from pyllama_raw.api.results import LabelScore, Likelihood

Measure = Literal["total", "per_token", "per_byte"]
MEASURES: tuple[Measure, ...] = get_args(Measure)


def label_scores(
    labels: Sequence[str], likelihoods: Sequence[Likelihood], measure: Measure
) -> list[LabelScore]:
    """*labels* by the softmax of the *measure* of their *likelihoods*, the likeliest first."""
    values = [getattr(likelihood, measure) for likelihood in likelihoods]
    # By the best one first, because exp() of all would be 0.
    best = max(values)
    weights = [exp(value - best) for value in values]
    scores = [
        LabelScore(index, label, weight / sum(weights), likelihood)
        for index, (label, likelihood, weight) in enumerate(
            zip(labels, likelihoods, weights, strict=True)
        )
    ]
    return sorted(scores, key=lambda score: -score.probability)
