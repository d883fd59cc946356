"""`pyllama-raw serve`: flags, files, and a process that answers."""

import os
import signal
import subprocess
import sys
from math import inf
from pathlib import Path

import httpx
import pytest

from pyllama_raw import devices
from pyllama_raw.cli import main
from pyllama_raw.cli.command import root_parser
from pyllama_raw.cli.serve import deployment_of
from pyllama_raw.errors import ConfigError
from pyllama_raw.options.profile import Profile
from pyllama_raw.serve.config import ModelsConfig
from pyllama_raw.serve.deployment import Deployment, read
from pyllama_raw.serve.run import budget_of, cached_models
from tests.serve.support import LIMIT_S
from tests.support.tiny import tiny_model

FILE = """
port = 8080
[service]
drain_s = 5
[context]
n_ctx = 4096
[models.small]
path = "small.gguf"
[models.large]
path = "large.gguf"
[models.large.scheduler]
n_slots = 2
"""


def made(*arguments):
    return deployment_of(root_parser().parse_args(["serve", *map(str, arguments)]))


def test_a_file_says_the_same_as_flags_which_win(tmp_path):
    """
    Options of all models, of one model, of the service and of the address.
    """
    file = tmp_path / "service.toml"
    file.write_text(FILE)
    made_of_file = made("--config", file, "--port", 9000, "--n-ctx", 8192)
    small, large = made_of_file.configs["small"], made_of_file.configs["large"]

    assert made_of_file.models == {"small": "small.gguf", "large": "large.gguf"}
    assert (made_of_file.port, made_of_file.service.drain_s) == (9000, 5)
    assert (small.context.n_ctx, large.context.n_ctx) == (8192, 8192)
    assert (small.scheduler.n_slots, large.scheduler.n_slots) == (8, 2)


def test_defaults_of_sampling_are_flags_which_win(tmp_path):
    """
    Any field of SamplingParams, as JSON or as text; a wrong one is named.
    """
    file = tmp_path / "service.toml"
    file.write_text("[service.defaults]\ntemperature = 0.5\ntop_k = 5\n")
    flags = ("--sampling", "temperature=0.2", "--sampling", 'stop=["x"]')
    service = made("--config", file, *flags).service

    defaults = service.defaults.model_dump(exclude_unset=True)
    assert defaults == {"temperature": 0.2, "top_k": 5, "stop": ("x",)}
    for wrong in ("temprature=1", "temperature"):
        with pytest.raises(SystemExit):
            made("--sampling", wrong)
    with pytest.raises(ConfigError, match="temperature"):
        made("--sampling", "temperature=hot")


def test_models_that_are_given_one_log_write_one_each(tmp_path):
    """
    With the name of the model before the suffix; a model alone writes the file itself.
    """
    log = tmp_path / "requests.jsonl"
    flags = ("--request-log", log, "--step-log", tmp_path / "steps")
    several = made("a.gguf", "b.gguf", "--alias", "x/y", "--alias", "z", *flags).configs
    alone = made("a.gguf", *flags).configs["a"]

    names = {name: Path(each.log.request_log).name for name, each in several.items()}
    assert names == {"x/y": "requests.x-y.jsonl", "z": "requests.z.jsonl"}
    assert Path(several["z"].log.step_log).name == "steps.z"
    assert str(alone.log.request_log) == str(log)


ON_DEMAND = """
[loading]
models_dir = "{folder}"
sleep_idle_s = 300
[loading.memory]
CPU = 1000
[models.small]
pinned = true
[models.small.context]
n_ctx = 512
[models.other]
path = "other.gguf"
unload_idle_s = 60
"""


def test_models_of_a_folder_and_of_a_file_are_loaded_on_demand(tmp_path):
    """
    A table of the file says more of a model of the folder; flags win.
    """
    (tmp_path / "models").mkdir()
    for name in ("small", "large"):
        (tmp_path / "models" / f"{name}.gguf").touch()
    file = tmp_path / "service.toml"
    file.write_text(ON_DEMAND.format(folder=tmp_path / "models"))
    deployment = made("--config", file, "--sleep-idle-s", 5, "--memory-bytes", "2K")
    folder = made("--models-dir", tmp_path / "models")
    loading, places = deployment.loading, deployment.places

    assert {*deployment.models} == {"small", "large", "other"}
    assert deployment.configs["small"].context.n_ctx == 512
    assert (places["small"].pinned, places["other"].unload_idle_s) == (True, 60)
    assert (loading.sleep_idle_s, loading.memory_bytes) == (5, 2048)
    assert loading.memory == {"CPU": 1000}
    assert ({*folder.models}, folder.is_on_demand) == ({"small", "large"}, True)
    assert not made("a.gguf", "b.gguf").is_on_demand
    assert made("a.gguf", "b.gguf", "--on-demand").is_on_demand
    with pytest.raises(ConfigError, match="models_dir"):
        made("--models-dir", tmp_path / "nowhere")


IDLE = """
[loading]
sleep_idle_s = 300
unload_idle_s = 600
[models.at_once]
path = "a.gguf"
sleep_idle_s = 0
[models.never]
path = "b.gguf"
sleep_idle_s = -1
unload_idle_s = -1
[models.usual]
path = "c.gguf"
pinned = true
"""


def test_a_model_has_idle_times_of_its_own(tmp_path):
    """
    0 is at once and below 0 never, whatever all models have.
    """
    file = tmp_path / "service.toml"
    file.write_text(IDLE)
    models = cached_models(made("--config", file), print, None, {})

    times = {name: (model.sleep_s, model.unload_s) for name, model in models.items()}
    assert times == {"at_once": (0, 600), "never": (inf, inf), "usual": (300, 600)}


def test_a_model_is_all_of_its_files(tmp_path):
    """
    Another second part or another projector makes it another model; a file beside them does not.
    """
    parts = [tmp_path / "models" / "m" / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    parts[0].parent.mkdir(parents=True)
    for path in (*parts, parts[0].with_name("mmproj-m.gguf")):
        path.touch()

    def key():
        deployment = made("--models-dir", tmp_path / "models")
        return cached_models(deployment, print, None, {})["m"].key

    keys = [key()]
    for path in (
        parts[0].with_name("notes.txt"),
        parts[1],
        parts[0].with_name("mmproj-m.gguf"),
    ):
        path.write_text("more")
        keys.append(key())

    assert keys[0] == keys[1]
    assert len({*keys[1:]}) == 3


@pytest.mark.skipif(sys.platform == "darwin", reason="names there are texts")
def test_files_whose_names_are_no_texts_are_no_models(tmp_path):
    """
    No request could name them, and no answer could list them.
    """
    for name in (b"a.gguf", b"\xff.gguf", b"\xfe/b.gguf", b"sees/c.gguf"):
        path = tmp_path / os.fsdecode(name)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "sees" / os.fsdecode(b"mmproj-\xff.gguf")).touch()
    deployment = made("--models-dir", tmp_path)

    assert {*deployment.models} == {"a", "sees"}
    assert deployment.configs["sees"].media.mmproj is None


@pytest.mark.native
def test_the_budget_is_what_is_said_or_what_is_free():
    """
    A device by its name, the host by its own option.
    """
    free = {d.name: d.memory_free_bytes for d in devices() if d.kind != "accel"}
    usual = budget_of(ModelsConfig())

    assert {*usual} == {*free}
    assert 0 < usual["CPU"] < free["CPU"]
    assert budget_of(ModelsConfig(memory_bytes=2048))["CPU"] == 2048
    assert budget_of(ModelsConfig(memory_bytes=2, memory={"CPU": 7}))["CPU"] == 7


def test_models_are_named_by_their_files_or_as_they_are_told():
    """
    In their order.
    """
    assert made("a.gguf", "b/c.gguf").models == {"a": "a.gguf", "c": "b/c.gguf"}
    assert made("a.gguf", "--alias", "x").models == {"x": "a.gguf"}
    assert made().models == {"default": None}
    assert made("--alias", "x").models == {"x": None}
    assert made().configs["default"].fit_ctx == 4096


def test_options_of_engines_are_those_of_the_other_commands(tmp_path):
    """
    A profile gives the model if none is named, and its options give way to flags.
    """
    profile = tmp_path / "a.json"
    context = {"n_ctx": 2048, "n_batch": 1024}
    Profile(path=tmp_path / "tuned.gguf", settings={"context": context}).save(profile)
    found = made("--profile", profile, "--n-ctx", 4096, "--fit-ctx", 1024)
    config = found.configs["tuned"]

    assert found.models == {"tuned": str(tmp_path / "tuned.gguf")}
    assert (config.context.n_ctx, config.context.n_batch) == (4096, 1024)
    assert config.fit_ctx == 1024


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "models = 5",
            "models=5: give a table, such as [models.assistant] with a path",
        ),
        ("models = [1]", "models=[1]: give a table"),
        ("[models]\na = 5", "models.a=5: give a table"),
        (
            "[models.a]\nn_ctx = 5",
            "models.a.n_ctx: give path, pinned, load_on_start, sleep_idle_s, "
            "unload_idle_s, or a table of options: model, context, scheduler, cache, "
            "embedding, media, log, speculation, engine; did you mean models.a.context.n_ctx?",
        ),
        ("[models.a]\ncontext = 5", "models.a.context=5: give a table"),
        (
            "[models.a.context]\nnctx = 5",
            "models.a: EngineConfig.context.nctx=5: give a known option; did you mean context.n_ctx?",
        ),
        ("a = " + "[" * 5000, "it nests too deeply"),
    ],
)
def test_a_mistake_in_a_file_has_its_place(text, message, tmp_path):
    """
    ConfigError, with what is allowed there.
    """
    file = tmp_path / "service.toml"
    file.write_text(text)

    with pytest.raises(ConfigError) as caught:
        Deployment.of(read(file))

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.gguf", "b.gguf", "--alias", "x"), "1 names for 2 models"),
        (("a.gguf", "b/a.gguf"), "give each MODEL an --alias of its own"),
        (("--alias", "x", "--alias", "y"), "2 names for 1 models"),
        (
            ("--config", "missing.toml"),
            "config 'missing.toml': No such file or directory",
        ),
        (
            ("--api-keys-file", "missing.txt"),
            "error: the keys in missing.txt: No such file or directory",
        ),
        (("--port", "99999"), "--port 99999: give at most 65535"),
    ],
)
def test_a_mistake_is_told_in_the_words_of_the_flags(arguments, message, capsys):
    """
    Before anything is loaded.
    """
    try:
        status = main(["serve", *arguments])
    except SystemExit as ended:
        status = ended.code

    assert status == 2
    assert message in capsys.readouterr().err


def test_an_option_that_a_file_misspells_is_told_in_its_words(tmp_path, capsys):
    """
    With the table of its model; no flag is meant, because flags are not in a file.
    """
    file = tmp_path / "service.toml"
    file.write_text("[models.a.context]\nnctx = 5")

    assert main(["serve", "--config", str(file)]) == 2
    assert capsys.readouterr().err == (
        "error: models.a.context.nctx 5: give a known option; did you mean context.n_ctx?\n"
    )


@pytest.mark.native
def test_a_process_answers_at_a_port_that_it_tells():
    """
    For two models, until SIGTERM comes.
    """
    files = [str(tiny_model("llama")), str(tiny_model("bert"))]
    command = [sys.executable, "-m", "pyllama_raw", "serve", *files]
    command += ["--alias", "a", "--alias", "b", "--port", "0", "--slots", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        serving = (line for line in process.stderr if line.startswith("serving at"))
        url = next(serving).split()[-1]
        with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
            models = client.get("/v1/models").json()["data"]
            body = {"model": "b", "input": "a"}
            vectors = client.post("/v1/embeddings", json=body).json()["data"]
        process.send_signal(signal.SIGTERM)
        code = process.wait(LIMIT_S)
    finally:
        process.kill()
        process.communicate()

    assert [model["id"] for model in models] == ["a", "b"]
    assert (len(vectors), code) == (1, 0)


@pytest.mark.native
def test_a_dry_run_shows_what_would_be_served(tmp_path, capsys):
    """
    The limits of each model, by the file and the flags, as `info` tells them.
    """
    file = tmp_path / "service.toml"
    path = tiny_model("llama")
    file.write_text(f'[models.a]\npath = "{path}"\nscheduler = {{ n_slots = 3 }}\n')

    assert main(["serve", "--config", str(file), "--n-ctx", "1536", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "n_slots            3" in told
    assert "n_ctx              1,536" in told
