"""
The texts of llama.cpp's test-grammar-integration: what its grammars take and refuse, ours do.

    python -m scripts.grammar_vectors LLAMA_CPP

The vectors are read from the source tree LLAMA_CPP. Grammars that name tokens are left out,
because their texts are those of another vocabulary, and so is what llama.cpp refuses of a
schema though the standard takes it.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema

from pyllama_raw import PyllamaError, SamplingParams
from pyllama_raw.engine.sampling import Constraints
from pyllama_raw.native.model import Model
from pyllama_raw.native.vocab import Vocab
from tests.support.number_schemas import follows
from tests.support.tiny import tiny_model

SOURCE = Path("tests/test-grammar-integration.cpp")
CALL = re.compile(r"\n    test_(grammar|schema)\(")
STRING = re.compile(
    r'u?8?R"(?P<mark>[^(\s]*?)\((?P<raw>.*?)\)(?P=mark)"|u?8?(?P<plain>"(?:\\.|[^"\\])*")'
    r"|//[^\n]*",
    re.DOTALL,
)


class Vector(NamedTuple):
    kind: str
    name: str
    source: str
    taken: list[str]
    refused: list[str]


def read(source: str) -> Iterator[Vector]:
    """The calls of test_grammar and test_schema in *source*."""
    for call in CALL.finditer(source):
        place, depth = call.end(), 1
        parts: list[list[str]] = [[]]
        while depth:
            if match := STRING.match(source, place):
                if match["raw"] is not None:
                    parts[-1].append(match["raw"])
                elif match["plain"]:
                    parts[-1].append(ast.literal_eval(match["plain"]))
                place = match.end()
                continue
            char = source[place]
            depth += (char in "({") - (char in ")}")
            if char == "," and depth == 1:
                parts.append([])
            place += 1
        name, text, accepted, refused = parts[:4]
        yield Vector(call[1], "".join(name).strip(), "".join(text), accepted, refused)


def mistakes(vector: Vector, constraints: Constraints, vocab: Vocab) -> Iterator[str]:
    """Texts that get another answer."""
    refused = vector.refused
    if vector.kind == "schema":
        schema = json.loads(vector.source)
        params = SamplingParams(json_schema=schema)
        refused = [text for text in refused if not is_valid_json(text, schema)]
    else:
        params = SamplingParams(grammar=vector.source)
    for texts, is_accepted in ((vector.taken, True), (refused, False)):
        for text in texts:
            if follows(constraints.make(params), vocab, text) != is_accepted:
                yield f"{vector.name}: {text!r} should be {is_accepted}"


def is_valid_json(text: str, schema: Any) -> bool:
    """Whether the standard takes it: llama.cpp writes fewer digits, for one."""
    is_old = isinstance(schema.get("items"), list)
    draft = jsonschema.Draft7Validator if is_old else jsonschema.Draft202012Validator
    try:
        return bool(draft(schema).is_valid(json.loads(text)))
    except ValueError:
        return False


def main() -> int:
    """Run the script."""
    (folder,) = sys.argv[1:]
    n_texts = n_wrong = 0
    with Model.load(tiny_model("llama-bytes"), vocab_only=True) as model:
        constraints = Constraints(model.vocab)
        for vector in read((Path(folder) / SOURCE).read_text("utf-8")):
            if "with tokens" in vector.name:
                continue
            n_texts += len(vector.taken) + len(vector.refused)
            try:
                for line in mistakes(vector, constraints, model.vocab):
                    n_wrong += 1
                    print(line)
            except PyllamaError as error:
                print(f"{vector.name} is refused: {error}")
                n_texts -= len(vector.taken) + len(vector.refused)
    print(f"{n_texts} texts, {n_wrong} with another answer")
    return bool(n_wrong)


if __name__ == "__main__":
    sys.exit(main())
