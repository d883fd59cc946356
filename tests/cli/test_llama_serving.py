"""Arguments of llama-server as a deployment of ours."""

import subprocess
import sys

import pytest

from pyllama_raw.cli.llama_arguments import read
from pyllama_raw.cli.llama_flags import FLAGS, Sets
from pyllama_raw.cli.llama_server import main
from pyllama_raw.cli.llama_serving import PARTS, deployment_of, fill_in
from pyllama_raw.errors import ConfigError
from tests.support.limits import LIMIT_S
from tests.support.tiny import tiny_model, tiny_projector


@pytest.fixture(autouse=True)
def hub(monkeypatch, tmp_path):
    """Nothing was fetched from Hugging Face."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def made(*arguments, **variables):
    return deployment_of(read([str(a) for a in arguments], variables, files=()))


def test_defaults_are_those_of_llama_server():
    """
    Its port, its origins, closed metrics, any name of a model; the file names it.
    """
    deployment = made("-m", "folder/a.gguf")
    service, config = deployment.service, deployment.configs["folder/a.gguf"]

    assert (deployment.host, deployment.port) == ("127.0.0.1", 8080)
    assert deployment.models == {"folder/a.gguf": "folder/a.gguf"}
    assert (service.in_place_of, service.any_model, service.drain_s) == (
        "llama-server",
        True,
        3.0,
    )
    assert service.cors_origins == ("*",)
    assert service.closed == ("metrics", "props")
    assert service.template_kwargs == {"enable_thinking": True}
    assert (config.context.n_ctx, config.fit_ctx) == (None, 4096)
    assert config.model.chat_template == "auto"


def test_ollama_starts_it_so():
    """
    The flags of its runner.
    """
    deployment = made(
        *("--model", "a.gguf", "--port", 4711, "--host", "127.0.0.1", "--no-webui"),
        *("--offline", "-c", 8192, "-np", 2, "--flash-attn", "on", "--no-jinja"),
        *("--chat-template", "chatml", "--load-mode", "none", "-b", 256, "-ub", 512),
        *("-ngl", 0, "-t", 4, "--split-mode", "none", "--main-gpu", 1),
        *("--context-shift", "--keep", 5, "--cache-type-k", "q8_0"),
        LLAMA_ARG_FIT_TARGET="512",
    )
    config = deployment.configs["a.gguf"]

    assert deployment.port == 4711
    assert (config.context.n_ctx, config.scheduler.n_slots) == (8192, 2)
    assert (config.context.n_batch, config.context.n_ubatch) == (256, 256)
    assert (config.context.flash_attn, config.context.type_k) == ("on", "q8_0")
    assert (config.model.n_gpu_layers, config.model.load_mode) == (0, "none")
    assert (config.model.split_mode, config.model.main_gpu) == ("none", 1)
    assert (config.scheduler.context_full, config.scheduler.n_keep) == ("shift", 5)
    assert config.fit_margin_bytes == 512 * 2**20
    assert config.model.chat_template == "chatml"
    assert "page" in deployment.service.closed


def test_names_and_a_hub():
    """
    The first name by the alphabet is that of the model, and all are taken.
    """
    deployment = made("-hf", "owner/name:Q8_0", "-a", "b,a")
    named_file = made("-hf", "owner/name", "-hff", "f.gguf")

    assert deployment.models == {"a": "hf:owner/name:Q8_0"}
    assert str(deployment.configs["a"].media.mmproj) == "auto"
    assert deployment.service.aliases == {"a": "a", "b": "a"}
    assert named_file.models == {"owner/name": "hf:owner/name/f.gguf"}


@pytest.mark.parametrize(
    ("arguments", "mode", "draft"),
    [
        ((), "auto", None),
        (("--spec-type", "none"), "off", None),
        (("--spec-type", "draft-mtp"), "mtp", None),
        (("--spec-type", "draft-simple", "-md", "b.gguf"), "draft", "b.gguf"),
    ],
)
def test_drafts_are_those_of_the_engine(arguments, mode, draft):
    """
    Their kind and their model come as far as its options.
    """
    config = made("-m", "a.gguf", *arguments).configs["a.gguf"].speculation

    assert (config.mode, config.draft and str(config.draft)) == (mode, draft)


def test_every_part_that_flags_set_is_read():
    """
    Those of an engine are its options; the others have a reader of their own.
    """
    places = [flag.meaning.place for flag in FLAGS if isinstance(flag.meaning, Sets)]
    own_parts = {"own", "service", "listen", "loading", "defaults"}

    assert {place.partition(".")[0] for place in places} == {*PARTS, *own_parts}


def test_words_that_are_two_options_of_ours():
    """
    Devices, the cache, cells by slot, thoughts, adapters that begin without an effect.
    """
    deployment = made(
        *("-m", "a.gguf", "-dev", "none", "-cram", 0, "--kv-unified-per-slot", 100),
        *(
            "-np",
            3,
            "--reasoning",
            "off",
            "--lora",
            "x/l.gguf",
            "--lora-scaled",
            "m:0.5",
        ),
    )
    off = made("-m", "a.gguf", "--lora", "l.gguf", "--lora-init-without-apply")
    config = deployment.configs["a.gguf"]
    adapters = [(a.name, a.path, a.scale) for a in deployment.adapters["a.gguf"]]

    assert (config.model.devices, config.model.n_gpu_layers) == (None, 0)
    assert (config.cache.mode, config.context.n_ctx) == ("live", 300)
    assert deployment.service.template_kwargs == {
        "enable_thinking": False,
        "thinking": False,
    }
    assert adapters == [("l", "x/l.gguf", 1.0), ("m", "m", 0.5)]
    assert [a.scale for a in off.adapters["a.gguf"]] == [0.0]


INI = """
[*]
c = 4096
[small]
model = small.gguf
load-on-startup = true
[large]
model = large.gguf
n-gpu-layers = 0
"""


def test_models_of_a_file_of_presets_are_loaded_on_demand(tmp_path):
    """
    Those that are to be loaded at the start are; the command line counts for all.
    """
    file = tmp_path / "presets.ini"
    file.write_text(INI)
    deployment = made("--models-preset", file, "-c", 2048, "--models-max", 1)
    configs = deployment.configs

    assert deployment.models == {"small": "small.gguf", "large": "large.gguf"}
    assert configs["small"].context.n_ctx == 2048
    assert configs["large"].model.n_gpu_layers == 0
    assert {n: p.load_on_start for n, p in deployment.places.items()} == {"small": True}
    assert deployment.is_on_demand
    assert deployment.loading.models_max == 1
    assert not deployment.service.any_model


def test_models_of_a_folder(tmp_path):
    """
    Files, and folders with a model in parts or with a projector; presets say more of them.
    """
    for name in (
        *("a.gguf", "draft-a.gguf", "mmproj-a.gguf", "notes.txt"),
        *("sees/sees.gguf", "sees/mmproj-F16.gguf", "empty/notes.txt"),
        *("parts/p-00002-of-00002.gguf", "parts/p-00001-of-00002.gguf"),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    presets = tmp_path / "presets.ini"
    presets.write_text(
        "[*]\nc = 4096\n[a]\nn-gpu-layers = 0\n[sees]\nsleep-idle-seconds = 5\n"
    )
    flags = ("--models-dir", tmp_path)
    deployment = made(*flags, "--no-models-autoload", "--models-preset", presets)
    folder = {name: str(tmp_path / path) for name, path in FOLDER.items()}
    config = deployment.configs

    assert deployment.models == folder
    assert config["sees"].media.mmproj == tmp_path / "sees/mmproj-F16.gguf"
    assert config["a"].media.mmproj is None
    assert (config["a"].model.n_gpu_layers, config["parts"].context.n_ctx) == (0, 4096)
    assert {n: place.sleep_idle_s for n, place in deployment.places.items()} == {
        "sees": 5
    }
    assert made(*flags, "--sleep-idle-seconds", 60).loading.sleep_idle_s == 60
    assert not deployment.loading.autoload
    with pytest.raises(ConfigError, match="models_dir"):
        made("--models-dir", tmp_path / "nowhere")


FOLDER = {
    "a": "a.gguf",
    "parts": "parts/p-00001-of-00002.gguf",
    "sees": "sees/sees.gguf",
}


def test_a_single_model_may_sleep():
    """
    It is loaded at the start, and whatever name a request has is taken for it.
    """
    deployment = made("-m", "a.gguf", "--sleep-idle-seconds", 5)
    awake = made("-m", "a.gguf", "--sleep-idle-seconds", -1)

    assert (deployment.is_on_demand, awake.is_on_demand) == (True, False)
    assert deployment.places["a.gguf"].load_on_start
    assert deployment.service.any_model


def test_without_a_model_there_are_those_that_were_fetched(tmp_path):
    """
    From Hugging Face, by the names that llama-server has for them, with their projectors; a folder
    or presets add others, and the default model is not loaded.
    """
    none = made("--port", 1)
    folder = tmp_path / "hub/models--owner--repo/snapshots/1"
    folder.mkdir(parents=True)
    for file in (
        "a-Q8_0.gguf",
        "b-f16-00001-of-00002.gguf",
        "b-f16-00002-of-00002.gguf",
    ):
        (folder / file).touch()
    (folder / "mmproj-a.gguf").touch()
    preset = tmp_path / "presets.ini"
    preset.write_text("[mine]\nmodel = a.gguf\n")
    deployment = made("--port", 1)

    assert none.models == {}
    assert deployment.models == {
        "owner/repo:F16": str(folder / "b-f16-00001-of-00002.gguf"),
        "owner/repo:Q8_0": str(folder / "a-Q8_0.gguf"),
    }
    projector = deployment.configs["owner/repo:Q8_0"].media.mmproj
    assert projector == folder / "mmproj-a.gguf"
    assert sorted(made("--models-preset", preset).models) == [
        "mine",
        "owner/repo:F16",
        "owner/repo:Q8_0",
    ]


def test_a_preset_may_stand_for_the_model_of_the_cache_that_it_names(tmp_path):
    """
    It is listed once then, and has the name of the cache, too; without the key there are two.
    """
    folder = tmp_path / "hub/models--owner--repo/snapshots/main"
    folder.mkdir(parents=True)
    for file in ("a-Q8_0.gguf", "a-F16.gguf"):
        (folder / file).touch()
    preset = tmp_path / "presets.ini"
    lines = "[mine]\nhf-repo = owner/repo:Q8_0\n[none]\nhf-repo = owner/repo:Q2_K\n"
    preset.write_text(f"[*]\ndedup-cache-models = 1\n{lines}")
    once = made("--models-preset", preset)
    preset.write_text(lines)
    twice = made("--models-preset", preset)

    assert sorted(once.models) == ["mine", "none", "owner/repo:F16"]
    assert once.service.aliases["owner/repo:Q8_0"] == "mine"
    assert sorted(twice.models) == ["mine", "none", "owner/repo:F16", "owner/repo:Q8_0"]


def test_a_mistake_has_the_words_and_the_status_of_llama_server(capsys):
    """
    Before anything of a server is imported.
    """
    assert main(["--no-such"]) == 1
    assert capsys.readouterr().err.startswith("error: invalid argument: --no-such\n")


@pytest.mark.native
@pytest.mark.parametrize("probe", ["--version", "--list-devices", "--help"])
def test_a_probe_waits_for_no_engine(probe):
    """
    Programs that start llama-server ask first: nothing of a server or of an engine is imported.
    """
    code = f"""
import sys
from pyllama_raw.cli.llama_server import main
main(["{probe}"])
slow = "argparse", "asyncio", "platform", "pydantic", "pyllama_raw.api", "pyllama_raw.serve", "ssl"
print(*(name for name in slow if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "")


def test_an_option_of_ours_that_is_wrong_is_named(capsys):
    """
    With its place.
    """
    assert main(["-m", "a.gguf", "--top-p", "7", "--log-disable"]) == 1
    assert "top_p" in capsys.readouterr().err


@pytest.mark.native
def test_a_model_has_all_the_cells_that_it_was_trained_for():
    """
    Unless a number is given.
    """
    path = str(tiny_model("llama"))
    config = made("-m", path).configs[path]
    explicit = made("-m", path, "-c", 512).configs[path]

    assert fill_in(path, config)[1].context.n_ctx == 2048
    assert fill_in(path, explicit) == (path, explicit)


@pytest.mark.native
@pytest.mark.usefixtures("media_library")
def test_a_model_of_a_hub_has_the_projector_of_its_repository(tmp_path, monkeypatch):
    """
    If there is one, unless that is refused; files that were fetched before need no network.
    """
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    projector, model = tiny_projector("gemma3")
    folders = [
        tmp_path / f"hub/models--o--{n}/snapshots/main" for n in ("sees", "reads")
    ]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "m-Q8_0.gguf").symlink_to(model)
    (folders[0] / "mmproj-m.gguf").symlink_to(projector)

    def media(*arguments):
        deployment = made("-hf", *arguments)
        (path,), (config,) = deployment.models.values(), deployment.configs.values()
        return fill_in(path, config)[1].media.mmproj

    assert media("o/sees:Q8_0") == folders[0] / "mmproj-m.gguf"
    assert media("o/sees", "--no-mmproj") is None
    assert media("o/reads") is None
