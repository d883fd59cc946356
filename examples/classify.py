"""Labels of a text, and answers to a question, by how likely a model finds them."""

from pyllama_raw import Engine

REVIEW = "Review: The plot is thin, but I laughed from start to end.\nSentiment:"
QUESTION = "The capital of France is"
ANSWERS = [" Paris", " Rome", " a city on the Seine"]

with Engine.open() as engine:
    for score in engine.classify(REVIEW, [" positive", " negative"]):
        print(f"{score.probability:.2f} {score.label}")

    likelihoods = engine.score_many(QUESTION, ANSWERS, n_top=1)
    for answer, likelihood in zip(ANSWERS, likelihoods, strict=True):
        mean, total = likelihood.per_token, likelihood.total
        print(f"{total:7.2f} {mean:6.2f} {likelihood.is_greedy!s:5} {answer}")
