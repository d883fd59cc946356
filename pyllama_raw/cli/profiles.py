"""Differences of a profile from the model or the machine that it is used with."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from pyllama_raw.cli.engine_options import profile_of
from pyllama_raw.options.machine import MAX_OTHERS, cpu_name, n_cpus
from pyllama_raw.options.profile import MachineFacts, Profile


def is_busy(profile: Profile) -> bool:
    """Whether others ran beside the measurements."""
    return (profile.others_cpus or 0.0) > MAX_OTHERS


def note_of(options: Namespace) -> str | None:
    """One line of what does not fit the profile of *options*; None if all does."""
    if getattr(options, "profile", None) is None:
        return None
    profile = profile_of(options)
    differences = "; ".join(
        _misfits(profile, options.model, MachineFacts(cpu=cpu_name(), n_cpus=n_cpus()))
    )
    return f"note: profile {options.profile}: {differences}" if differences else None


def _misfits(profile: Profile, model: str | None, here: MachineFacts) -> Iterator[str]:
    tuned = profile.path
    file = Path(model) if model is not None else tuned
    if tuned is not None and file is not None and _differs(file, profile):
        yield f"it was measured with another model, {tuned.name}"
    there = profile.machine
    if there is not None and there != here:
        yield (
            f"it was measured on another machine, {there.cpu} with {there.n_cpus} CPUs"
        )
    if is_busy(profile):
        yield f"other processes used {profile.others_cpus:.2f} CPUs while it was measured"


def _differs(file: Path, profile: Profile) -> bool:
    """Whether *file* has another name or size than the model of *profile*."""
    assert profile.path is not None
    if file.name != profile.path.name:
        return True
    is_known = profile.model_bytes is not None and file.is_file()
    return is_known and file.stat().st_size != profile.model_bytes
