"""Flags of the engine: each reaches the field that it names."""

from argparse import ArgumentParser
from pathlib import Path

import pytest

from pyllama_raw import ConfigError, ContextConfig, Profile
from pyllama_raw.cli.options import add_engine, add_generate, engine_config, model_spec
from pyllama_raw.options.config import CacheConfig, SpeculationConfig
from pyllama_raw.options.profile import Settings


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


def test_speculation_can_be_chosen():
    """
    By its mode, which is no mode of the cache; a profile has it, too, and the flag wins.
    """
    parser = ArgumentParser()
    add_engine(parser)

    line = ["--speculation", "lookup", "--cache", "off"]
    config = engine_config(parser.parse_args(line))
    assert (config.speculation.mode, config.cache.mode) == ("lookup", "off")
    assert engine_config(parser.parse_args([])).speculation.mode == "auto"
    config = engine_config(parser.parse_args(["--draft", "small.gguf"]))
    assert config.speculation == SpeculationConfig(mode="draft", draft="small.gguf")
    with pytest.raises(ConfigError, match="speculation"):
        engine_config(parser.parse_args(["--speculation", "fast"]))


def test_the_sampler_placement_can_be_chosen():
    """
    As the field of the configuration; not given, it is that of the default.
    """
    parser = ArgumentParser()
    add_engine(parser)

    given = engine_config(parser.parse_args(["--sampler-placement", "host"]))

    assert given.sampler_placement == "host"
    assert engine_config(parser.parse_args([])).sampler_placement == "auto"


def test_flags_win_over_the_profile(tmp_path: Path):
    """
    The profile names options and a model, for what no flag names.
    """
    file = tmp_path / "p.json"
    settings = Settings(context={"n_ubatch": 256, "n_threads": 3})
    Profile(path=Path("tuned.gguf"), settings=settings).save(file)
    parser = ArgumentParser()
    add_generate(parser)

    plain = parser.parse_args(["--profile", str(file)])
    flags = parser.parse_args(
        ["--profile", str(file), "--threads", "1", "--model", "mine.gguf"]
    )

    assert engine_config(plain).context == ContextConfig(n_ubatch=256, n_threads=3)
    assert engine_config(flags).context == ContextConfig(n_ubatch=256, n_threads=1)
    assert [model_spec(plain), model_spec(flags)] == [Path("tuned.gguf"), "mine.gguf"]


@pytest.mark.parametrize(
    ("profile", "flags", "found"),
    [({}, [], 4096), ({"fit_ctx": 0}, [], 0), ({"fit_ctx": 9}, ["--fit-ctx", "7"], 7)],
)
def test_commands_fit_the_memory_unless_somebody_says(
    profile: dict[str, int], flags: list[str], found: int, tmp_path: Path
):
    """
    The default of commands is weaker than a profile, which is weaker than the flag.
    """
    file = tmp_path / "p.json"
    Profile(settings=Settings(engine=profile)).save(file)
    parser = ArgumentParser()
    add_engine(parser)

    given = parser.parse_args(["--profile", str(file), *flags])

    assert engine_config(given).fit_ctx == found
