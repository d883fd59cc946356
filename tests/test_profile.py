"""Profiles: checked when read, and weaker than what is said explicitly."""

from pathlib import Path

import pytest

from pyllama_raw import ConfigError, ContextConfig, EngineConfig, Profile
from pyllama_raw.options.frozen import Frozen
from pyllama_raw.options.profile import Measured, Settings


def test_a_profile_survives_its_file(tmp_path: Path):
    """
    What is saved is what is loaded.
    """
    profile = Profile(
        path=Path("model.gguf"),
        settings=Settings(context={"n_ubatch": 256}, scheduler={"token_budget": 128}),
        before=Measured(prefill_tok_per_s=1.5, decode_tok_per_s=2.5, perplexity=3.5),
    )

    profile.save(tmp_path / "p.json")

    assert Profile.load(tmp_path / "p.json") == profile


def test_explicit_options_win():
    """
    Fields of the profile hold where nothing else was said.
    """
    profile = Profile(settings=Settings(context={"n_ubatch": 256, "n_threads": 3}))

    config = profile.engine_config(
        context={"n_threads": 1}, engine={"deterministic": True}
    )

    assert config.context == ContextConfig(n_ubatch=256, n_threads=1)
    assert config.deterministic


def test_a_profile_has_every_part_of_an_engine():
    """
    Whatever part an EngineConfig has can be in the file.
    """
    parts = {n for n, v in EngineConfig() if isinstance(v, Frozen)}

    assert parts | {"engine"} == Settings.model_fields.keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting property name"),
        ("[]", "no JSON object"),
        (
            '{"settings": {"context": {"n_ubatch": 0}}}',
            "EngineConfig.context.n_ubatch=0",
        ),
        ('{"settings": {"context": {"ubatch": 1}}}', "ubatch"),
        ('{"settings": {"sampler": {}}}', "settings.sampler"),
        ('{"version": 2}', "version"),
        ("{}", "no options: give a path, or settings"),
        ('{"version": 1}', "no options: give a path, or settings"),
        ('{"self": 1, "path": "m.gguf"}', "Profile.self=1"),
        ('{"settings": {"context": {"self": 1}}}', "self=1: give a known option"),
        (
            '{"settings": {"engine": {"model": {}}}}',
            "engine.model={}: give it as a part",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str, tmp_path: Path):
    """
    A file by hand is refused like options by hand.
    """
    file = tmp_path / "p.json"
    file.write_text(text)

    with pytest.raises(ConfigError, match=words):
        Profile.load(file)


def test_a_profile_that_is_not_there_is_named(tmp_path: Path):
    """
    The error has the path.
    """
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        Profile.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize("name", ["contxt", "self"])
def test_an_unknown_part_is_refused(name: str):
    """
    Options that are given for a part that is not there are not lost in silence.
    """
    with pytest.raises(ConfigError, match=f"{name}={{}}: give a known option"):
        Profile().engine_config(**{name: {}})


def test_a_file_that_nests_too_deeply_is_refused(tmp_path: Path):
    """
    As any other file that is no profile.
    """
    file = tmp_path / "p.json"
    file.write_text("[" * 200_000)

    with pytest.raises(ConfigError, match="nests too deeply"):
        Profile.load(file)
