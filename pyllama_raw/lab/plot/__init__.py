"""
Pictures of what an engine or a simulation did, from its logs.

    pictures(Path("fcfs.jsonl"), Path("sjf.jsonl"), Path("bench.jsonl")).save(Path("plots"))

In a notebook the value of `pictures(...)` shows itself.
"""

from pyllama_raw.lab.plot.pictures import Pictures, compared, pictures

__all__ = ["Pictures", "compared", "pictures"]
