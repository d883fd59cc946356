"""Limits of a chat template for one chat."""

MAX_CPU_S = 1.0  # others wait for as long: most chats take milliseconds
MAX_MEMORY_BYTES = 2**29
MAX_CHARACTERS = 2**24  # of the prompt, and of the messages together
MAX_MESSAGES = 2**13  # of a chat
MAX_DEPTH = 100  # lists and mappings in each other
MAX_VALUES = 2**18  # texts, numbers, lists and mappings of all messages
N_PROCESSES = 2  # one slow chat does not keep the others waiting
