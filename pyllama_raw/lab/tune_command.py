"""`tune`: measure, show what was found, write the profile."""

from __future__ import annotations

import math
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from pyllama_raw.cli.options import is_busy
from pyllama_raw.engine.estimate import kernels_used
from pyllama_raw.lab.tune import Tuning, Work, n_measurements
from pyllama_raw.lab.tune import tune as search
from pyllama_raw.native.model import Model
from pyllama_raw.options.models import resolve_model
from pyllama_raw.options.profile import Measured, Profile, check_writable


def tune(options: Namespace) -> int:
    """Run the command; return its exit status."""
    model = resolve_model(options.model)
    out = Path(options.out or f"{model.stem}.profile.json")
    check_writable(out)
    work = Work(
        n_slots=options.n_slots,
        n_prompt=options.prompt_tokens,
        n_output=options.output_tokens,
        max_step_s=options.max_step_s,
    )
    total, began = n_measurements(), time.monotonic()
    with tqdm(desc="measuring", total=total, unit="", disable=None) as bar:

        def note(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()
            if bar.disable:  # no terminal: a line each, for who reads a log
                bar.n += 1
                seconds = time.monotonic() - began
                line = f"measured {bar.n} of about {total}, {seconds:.0f} s: {text}"
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()

        tuning = search(
            model,
            work,
            file_types=options.file_types or ["q4_0"],
            keep=options.requantize,
            progress=note,
            max_s=math.inf if options.minutes is None else 60 * options.minutes,
        )
        bar.total = bar.n
    tuning.profile.save(out)
    sys.stdout.write("\n".join(_lines(tuning, out, copy=options.requantize)) + "\n")
    return 2 if is_busy(tuning.profile) else 0


def _lines(tuning: Tuning, out: Path, *, copy: Path | None) -> Iterator[str]:
    profile = tuning.profile
    before, after = profile.before, profile.after
    assert before is not None
    assert after is not None
    yield f"{'':22} {'prefill':>13} {'decode':>13} {'perplexity':>18}"
    yield _row("the defaults", before, before)
    yield _row("this profile", after, before)
    for file_type, measured in tuning.requantised.items():
        yield _row(f"the same in {file_type}", measured, before)
    yield f"settings: {_settings(profile)}"
    yield f"kernels: {_kernels(profile)}"
    yield f"model: {profile.path}"
    best = max(tuning.requantised.values(), key=_decode, default=after)
    if copy is None and _decode(best) > 1.1 * _decode(after):
        yield "requantising pays here: --requantize FILE keeps the file in a new place"
    yield f"written: {out}"
    if is_busy(profile):
        yield (
            f"NO PROOF: other processes used {profile.others_cpus:.2f} CPUs meanwhile; "
            "run it again on a quiet machine"
        )


def _kernels(profile: Profile) -> str:
    """Kernels that compute with the profile: the search may have turned some off."""
    assert profile.path is not None
    config = profile.engine_config()
    with Model.load(profile.path, **config.model.loading) as model:
        return kernels_used(model, config)


def _decode(measured: Measured) -> float:
    return measured.decode_tok_per_s


def _row(name: str, measured: Measured, before: Measured) -> str:
    prefill = measured.prefill_tok_per_s
    decode = measured.decode_tok_per_s
    return (
        f"{name:22} {prefill:6.0f} ({prefill / before.prefill_tok_per_s:3.1f}x) "
        f"{decode:6.0f} ({decode / before.decode_tok_per_s:3.1f}x) "
        f"{_perplexity(measured, before):>18}"
    )


def _perplexity(measured: Measured, before: Measured) -> str:
    if measured.perplexity is None or before.perplexity is None:
        return "-"
    change = measured.perplexity / before.perplexity - 1
    return f"{measured.perplexity:.2f} ({100 * change:+.1f} %)"


def _settings(profile: Profile) -> str:
    fields = profile.settings.model_dump()
    settings = [
        f"{name}={value}" for part in fields.values() for name, value in part.items()
    ]
    return ", ".join(settings) or "the defaults"
