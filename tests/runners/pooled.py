"""Runners that are not well, a clock that is set, and requests to any runner."""

from pyllama_raw import SamplingParams
from pyllama_raw.runners import MockRunner, RunnerHealth
from pyllama_raw.runners.errors import NetworkError

FEW = SamplingParams(max_tokens=2)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Sick(MockRunner):
    """A runner that is not well."""

    is_well = False

    async def health(self) -> RunnerHealth:
        return RunnerHealth(self.is_well, self.is_well)


class Stillborn(MockRunner):
    """A runner that cannot start."""

    async def start(self) -> None:
        raise NetworkError("nobody is there")


def counts(*runners: MockRunner) -> list[int]:
    return [len(runner.requests) for runner in runners]


async def ask(runner, prompt="a prompt", n=1, **options):
    for _ in range(n):
        result = await runner.generate(prompt, FEW, **options).collect()
    return result
