"""Open a model with what `pyllama-raw tune` has found."""

from pathlib import Path

import anyio

from pyllama_raw import AsyncEngine, Profile, SamplingParams

FILE = Path("model.profile.json")  # tune --out model.profile.json


async def main(profile: Profile) -> None:
    config = profile.engine_config(context={"n_ctx": 512})  # what is said here wins
    async with AsyncEngine.open(profile.path, config) as engine:
        params = SamplingParams(max_tokens=8, temperature=0)
        result = await engine.complete("The capital of France is", params)
        print(result.text)


anyio.run(main, Profile.load(FILE) if FILE.exists() else Profile())
