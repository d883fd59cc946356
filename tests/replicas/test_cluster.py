"""What the command of Ray may give."""

import pytest

from pyllama_raw.errors import ConfigError

pytest.importorskip("ray.serve", reason="needs the extra ray")

from pyllama_raw.replicas.cluster import application

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "service.toml"
    path.write_text('[models.m]\npath = "m.gguf"\n[scheduler]\nn_slots = 2\n')
    return str(path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "config is missing"),
        ({"replicas": "2"}, "'replicas' is unknown"),
        ({"n_replicas": "two"}, "options of replicas"),
        ({"router": "random"}, "give one of 'round_robin'"),
    ],
)
def test_mistakes_are_named(options, reason, file):
    """
    Before anything is started.
    """
    config = {"config": file} if options else {}

    with pytest.raises(ConfigError, match=reason):
        application(config | options)


def test_words_of_a_command_line_will_do(file):
    """
    Numbers come as text.
    """
    words = {"config": file, "n_replicas": "2", "max_replicas": "4", "n_cpus": "0.5"}

    assert application(words) is not None
