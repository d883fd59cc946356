"""Flags of the engine: each reaches the field that it names."""

from argparse import ArgumentParser
from pathlib import Path

from pyllama_raw.cli.options import add_engine, engine_config
from pyllama_raw.config import CacheConfig


def test_cache_flags_reach_the_configuration():
    """
    Sizes are read with their unit; what is not given keeps its default.
    """
    parser = ArgumentParser()
    add_engine(parser)
    line = "--cache live --cache-bytes 48M --cache-dir states --cache-disk-bytes 1.5GiB"

    given = engine_config(parser.parse_args(line.split())).cache

    assert given == CacheConfig(
        mode="live",
        max_bytes=48 * 2**20,
        directory=Path("states"),
        max_disk_bytes=3 * 2**29,
    )
    assert engine_config(parser.parse_args([])).cache == CacheConfig()


def test_the_sampler_placement_can_be_chosen():
    """
    As the field of the configuration; not given, it is that of the default.
    """
    parser = ArgumentParser()
    add_engine(parser)

    given = engine_config(parser.parse_args(["--sampler-placement", "host"]))

    assert given.sampler_placement == "host"
    assert engine_config(parser.parse_args([])).sampler_placement == "auto"
