"""
The test vocabulary: 256 bytes, 56 merges, 8 special tokens.

Any text can be written with it: a character beyond ASCII takes several tokens, a common
word or syllable one. It is byte-level BPE, written in the printable stand-ins for bytes
that `tokenizer.ggml.model = "gpt2"` expects.
"""

from __future__ import annotations

N_BYTES = 256

# In order of rank: what a merge joins stands before it.
MERGES = (
    (" ", "t"), ("h", "e"), (" t", "he"), (" ", "a"), ("i", "n"), (" ", "s"), ("r", "e"),
    ("o", "n"), (" ", "w"), ("e", "r"), (" ", "c"), (" ", "o"), ("n", "d"), (" a", "nd"),
    ("a", "n"), (" ", "b"), ("a", "t"), ("o", "r"), (" ", "in"), ("o", "u"), ("i", "s"),
    (" ", "f"), ("in", "g"), ("i", "t"), (" ", "m"), (" ", "p"), ("e", "n"), ("e", "s"),
    ("e", "d"), (" ", "d"), (" ", "l"), ("a", "l"), (" t", "o"), ("s", "t"), (" o", "f"),
    ("a", "r"), (" ", "h"), ("l", "e"), ("a", "s"), (" b", "e"), (" ", "n"), ("i", "c"),
    ("r", "o"), ("i", "on"), ("e", "l"), ("v", "e"), (" ", "g"), ("l", "l"), ("en", "t"),
    (" t", "h"), ("l", "y"), (" ", "is"), ("o", "m"), ("u", "s"), ("u", "r"), ("o", "w"),
)  # fmt: skip
SPECIAL = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
    "<|mask|>",
    "<|sep|>",
    "<|unknown|>",
)
N_VOCAB = N_BYTES + len(MERGES) + len(SPECIAL)
BOS, EOS, IM_START, IM_END, PAD, MASK, SEP, UNKNOWN = range(
    N_VOCAB - len(SPECIAL), N_VOCAB
)
END_OF_GENERATION = (EOS, IM_END)
UNPRINTABLE = (*range(ord(" ")), *range(0x7F, N_BYTES))

NORMAL, CONTROL = 1, 3  # llama.h: enum llama_token_type

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def stand_in(byte: int) -> str:
    """The character that means *byte*: itself if it is visible, else one above 255."""
    invisible = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    return chr(N_BYTES + invisible.index(byte)) if byte in invisible else chr(byte)


def spell(text: str) -> str:
    """*text* in stand-ins."""
    return "".join(stand_in(byte) for byte in text.encode())


def with_words(*words: str) -> dict[str, object]:
    """The keys that change if *words* are tokens, in place of the last merged ones."""
    tokens = pieces()
    tokens[-len(SPECIAL) - len(words) : -len(SPECIAL)] = map(spell, words)
    return {"tokenizer.ggml.tokens": tokens}


def extended(n_tokens: int) -> dict[str, object]:
    """The keys that change if tokens of no meaning follow, *n_tokens* with those there are."""
    names = [f"<|{index}|>" for index in range(N_VOCAB, n_tokens)]
    return {
        "tokenizer.ggml.tokens": [*pieces(), *names],
        "tokenizer.ggml.token_type": [*kinds(), *([CONTROL] * len(names))],
    }


def pieces() -> list[str]:
    """The text of each token, in stand-ins."""
    tokens = [stand_in(byte) for byte in range(N_BYTES)]
    tokens += [spell(left + right) for left, right in MERGES]
    return [*tokens, *SPECIAL]


def kinds() -> list[int]:
    """The type of each token."""
    n_normal = N_VOCAB - len(SPECIAL)
    return [NORMAL] * n_normal + [CONTROL] * len(SPECIAL)


def metadata() -> dict[str, object]:
    """The `tokenizer.` keys of a GGUF file."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": pieces(),
        "tokenizer.ggml.token_type": kinds(),
        "tokenizer.ggml.token_type_count": 2,  # of BERT's segments, read for BERT only
        "tokenizer.ggml.merges": [f"{spell(a)} {spell(b)}" for a, b in MERGES],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.padding_token_id": PAD,
        "tokenizer.ggml.mask_token_id": MASK,
        "tokenizer.ggml.seperator_token_id": SEP,
        "tokenizer.ggml.unknown_token_id": UNKNOWN,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
