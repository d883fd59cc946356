"""Slots of devices: who gets one, who is refused, and what the dead leave behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyllama_raw import ModelConfig
from pyllama_raw.engine import shared_models
from pyllama_raw.engine import shared_models as leases
from pyllama_raw.engine.shared_models import Lease, open_model, places_of, take_lease
from pyllama_raw.errors import LeaseRefused, ModelLoadFailed
from pyllama_raw.native.libllama import Device
from tests.engine.test_shared_models import Halfway
from tests.native.support import run_python

GPU = Device("CUDA0", "a GPU", "gpu", 2**31, 2**32, "0000:01:00.0")
FILE = "gpu-0000_01_00_0-slot-0.lock"


def options(directory: Path, lease: dict | None = None, **fields: object) -> dict:
    lease = {"margin_bytes": 0, "directory": directory} | (lease or {})
    return ModelConfig(lease=lease, **fields).opening


def take(directory: Path, *found: Device, **fields: object) -> Lease | None:
    return take_lease(options(directory, fields), found or (GPU,))


def test_a_lease_is_a_file_as_long_as_it_is_held(tmp_path: Path):
    """
    It says who has it; it is gone once it is given back, which can be repeated.
    """
    lease = take(tmp_path)
    assert lease is not None

    said = json.loads((tmp_path / FILE).read_text())
    lease.release()
    lease.release()

    assert said.pop("created_at_unix_ms") > 1.7e12
    assert said == {"pid": os.getpid(), "device": "0000_01_00_0", "slot": 0}
    assert list(tmp_path.iterdir()) == []


def test_a_full_device_is_refused(tmp_path: Path):
    """
    With two slots the third model is one too many; a slot that is given back is free.
    """
    held = [take(tmp_path, max_models=2), take(tmp_path, max_models=2)]

    with pytest.raises(LeaseRefused, match="0000_01_00_0 already has 2 models"):
        take(tmp_path, max_models=2)
    held[0].release()
    again = take(tmp_path, max_models=2)

    assert [path.name for path in again.files] == [FILE]
    for lease in (held[1], again):
        lease.release()


def test_what_a_dead_process_left_is_taken_over(tmp_path: Path):
    """
    A file that nobody holds is no slot that is taken, whatever it says.
    """
    (tmp_path / FILE).write_text(json.dumps({"pid": 2**32 - 1}) + " " * 999)

    lease = take(tmp_path)

    assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    lease.release()


@pytest.mark.parametrize(
    ("fields", "found"),
    [({"n_gpu_layers": 0}, GPU), ({}, Device("CPU", "", "cpu", 1, 1))],
    ids=["no layers", "no device"],
)
def test_what_uses_no_device_takes_no_slot(fields, found, tmp_path: Path):
    """
    Not even the directory is made.
    """
    directory = tmp_path / "leases"

    assert take_lease(options(directory, **fields), (found,)) is None
    assert not directory.exists()


def test_a_margin_stays_free(tmp_path: Path):
    """
    A device with less is refused; one that does not tell is not.
    """
    short = Device("GPU", "", "gpu", 127, 1000)

    with pytest.raises(LeaseRefused, match="safety margin is 128"):
        take(tmp_path, short, margin_bytes=128)

    take(tmp_path, short, margin_bytes=127).release()
    take(tmp_path, Device("GPU", "", "gpu", 0, 0), margin_bytes=128).release()
    assert list(tmp_path.iterdir()) == []


def test_devices_have_keys_that_files_can_be_named_by():
    """
    Each device is there once, by its place in the machine, its name or its number.
    """
    found = (
        Device("CPU", "", "cpu", 1, 1),
        Device("GPU B", "", "gpu", 20, 99),
        Device("", "", "igpu", 10, 99),
        Device("GPU B", "", "gpu", 30, 99),
    )

    assert places_of({}, found) == [("GPU_B", 20), ("gpu-2", 10)]
    assert places_of({"devices": [""]}, found) == [("gpu-2", 10)]
    one = {"split_mode": "none", "main_gpu": 1}
    assert places_of(one, found) == [("gpu-2", 10)]


def test_a_lease_is_of_all_devices_or_of_none(tmp_path: Path):
    """
    The slots of the first devices are given back if a later one has none.
    """
    second = Device("CUDA1", "", "gpu", 1, 1, "1")
    other = take(tmp_path, second)

    with pytest.raises(LeaseRefused, match="device 1 already"):
        take(tmp_path, GPU, second)

    assert list(tmp_path.iterdir()) == [*other.files]
    other.release()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path):
    """
    The error is the one of a device that has no slot.
    """
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(LeaseRefused, match=r"has no slots: .*file"):
        take(file)


class Models:
    """Stands for the native Model: a load that works or fails, while a slot is held."""

    def __init__(self, directory: Path, *, fails: bool) -> None:
        self._directory, self._fails = directory, fails
        self.seen: list[object] = []  # files at the load and at the end, and options

    def load(self, path: Path, *, progress: Halfway, **fields: object) -> "Models":
        self.seen += [len(list(self._directory.iterdir())), fields]
        if self._fails:
            raise ModelLoadFailed(str(path), "damaged")
        return self

    def close(self) -> None:
        self.seen.append(len(list(self._directory.iterdir())))


@pytest.mark.parametrize("fails", [False, True])
def test_a_lease_is_taken_first_and_given_back_last(fails, tmp_path: Path, monkeypatch):
    """
    Also after a load that failed. libllama sees nothing of it.
    """
    directory = tmp_path / "leases"
    models = Models(directory, fails=fails)
    monkeypatch.setattr(shared_models, "Model", models)
    monkeypatch.setattr(shared_models, "LoadProgress", Halfway)
    monkeypatch.setattr(leases, "devices", lambda: (GPU,))
    path = tmp_path / "model.gguf"
    path.touch()

    if fails:
        with pytest.raises(ModelLoadFailed):
            open_model(path, options(directory))
    else:
        open_model(path, options(directory)).close()

    assert models.seen == [1, {}] + [1] * (not fails)
    assert list(directory.iterdir()) == []


PROGRAM = """
import sys
from pathlib import Path
from tests.engine.test_lease import take
from pyllama_raw.errors import LeaseRefused
print("ready", flush=True)
sys.stdin.readline()
try:
    lease = take(Path(sys.argv[1]), max_models=int(sys.argv[2]))
    print(*[path.name for path in lease.files], flush=True)
except LeaseRefused:
    print("refused", flush=True)
sys.stdin.readline()
"""


def test_of_many_processes_one_has_each_slot_and_the_killed_have_none(tmp_path: Path):
    """
    Five want three slots at once. What is left by one that is killed is free at once.
    """
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "3"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    all_of_them = [subprocess.Popen(command, **pipes) for _ in range(5)]
    try:
        for each in all_of_them:
            assert each.stdout.readline() == "ready\n"
        for each in all_of_them:
            each.stdin.write("go\n")
            each.stdin.flush()
        said = [each.stdout.readline().strip() for each in all_of_them]
        killed = next(e for e, s in zip(all_of_them, said, strict=True) if s == FILE)
        with pytest.raises(LeaseRefused):
            take(tmp_path, max_models=3)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        lease = take(tmp_path, max_models=3)
    finally:
        for each in all_of_them:
            each.kill()
            each.communicate()

    slots = [FILE.replace("0.lock", f"{n}.lock") for n in range(3)]
    assert sorted(said) == sorted([*slots, *["refused"] * 2])
    assert [path.name for path in lease.files] == [FILE]
    lease.release()


FORK = """
import os
import sys
from pathlib import Path
from pyllama_raw.errors import LeaseRefused
from tests.engine.test_lease import take
directory = Path(sys.argv[1])
lease = take(directory)
read, write = os.pipe()
if os.fork() == 0:
    lease.release()
    os.close(write)
    os.read(read, 1)
    os._exit(0)
try:
    take(directory)
except LeaseRefused:
    print("refused")
lease.release()
print(*[path.name for path in take(directory).files])
os.close(write)
os.wait()
"""


def test_a_fork_has_no_lease_of_its_parent(tmp_path: Path):
    """
    It gives nothing back, and keeps nothing when its parent does.
    """
    done = run_python(FORK, tmp_path)

    assert (done.stdout, done.stderr) == (f"refused\n{FILE}\n", "")
