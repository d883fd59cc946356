"""
`chat`: a conversation in the terminal, or with a pipe.

Ctrl-C cancels one answer; the engine and what it has cached stay. It is an exception only
while a line is read. Otherwise it is noted, and stops the answer.
"""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from pyllama_raw.api.blocking import BlockingGeneration
from pyllama_raw.api.results import Result
from pyllama_raw.cli.flags import scales_of
from pyllama_raw.cli.inputs import Conversation
from pyllama_raw.cli.options import SAMPLING, given
from pyllama_raw.cli.running import Terminal, opened
from pyllama_raw.core.request import FinishReason
from pyllama_raw.errors import PromptTooLong, RequestError
from pyllama_raw.options.sampling import SamplingParams

WAKE_S = 0.2


def chat(options: Namespace) -> int:
    """Run the command; return its exit status."""
    params = SamplingParams(**given(options, SAMPLING))
    with opened(options, "generate") as (engine, terminal):
        for adapter in options.adapters:
            engine.load_adapter(adapter.name, adapter.path)
        generate = partial(engine.generate, adapters=scales_of(options.adapters))
        # What cannot chat says so now, whatever comes on the standard input.
        engine.render([{"role": "user", "content": "a"}])
        terminal.close()
        talker = Chat(generate, params, terminal, Conversation(options.system))
        with _handling(signal.SIGINT, talker.on_interrupt), _waking():
            return talker.run()


@dataclass
class Chat:
    """Reads lines and answers them until there are no more."""

    _generate: Callable[..., BlockingGeneration]
    _params: SamplingParams
    _terminal: Terminal
    _conversation: Conversation
    _generation: BlockingGeneration | None = None  # what Ctrl-C cancels
    _is_stopping: bool = False  # Ctrl-C came, and no line was read
    _is_reading: bool = False

    @property
    def _is_seen(self) -> bool:
        return sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> int:
        """
        Return the exit status: 1 if a message could not be answered.

        Raises:
            KeyboardInterrupt: Ctrl-C came twice at the prompt.
        """
        status, was_interrupted = 0, False
        if self._is_seen:
            with suppress(ImportError):
                import readline  # noqa: F401 - lets input() edit and recall lines
            self._terminal.say("/help lists the commands, /quit ends")
        while True:
            try:
                line = self._read()
                if line is None or line.rstrip() == "/quit":
                    return status
                if not self._do(line.rstrip()):
                    status = 1
                was_interrupted = False
            except KeyboardInterrupt:
                self._is_reading = False
                if was_interrupted:
                    raise
                was_interrupted = True
                self._terminal.say("\nCtrl-C again ends")

    def on_interrupt(self, *_: object) -> None:
        """Handle SIGINT: leave the prompt, or stop the answer that is there or comes."""
        if self._is_reading:
            raise KeyboardInterrupt
        self._is_stopping = True
        if self._generation is not None:
            self._generation.cancel()

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        try:
            self._is_reading = True
            if self._is_stopping:  # there was nothing to stop
                self._is_stopping = False
                raise KeyboardInterrupt
            return input("> " if self._is_seen else "")
        except EOFError:
            if self._is_seen:
                self._terminal.write("\n")
            return None
        finally:
            self._is_reading = False

    def _do(self, line: str) -> bool:
        """Follow a command or answer a message; return whether that was possible."""
        if line.startswith("/"):
            self._terminal.say(self._conversation.command(line))
            return True
        return not line.strip() or self._turn(line.strip())

    def _turn(self, text: str) -> bool:
        messages = self._conversation.with_message(text)
        try:
            result = self._answered(self._generate(messages, self._params))
        except RequestError as error:
            advice = "; /reset begins anew" if isinstance(error, PromptTooLong) else ""
            self._terminal.say(f"error: {error}{advice}")
            return False
        self._conversation.take(text, result.text)
        if not result.text.endswith("\n"):
            self._terminal.write("\n")
        self._terminal.note(_summary(result, self._params))
        return True

    def _answered(self, generation: BlockingGeneration) -> Result:
        """The whole answer, or what there is of it when Ctrl-C comes."""
        try:
            with generation:
                self._generation = generation
                if self._is_stopping:  # before it had begun
                    generation.cancel()
                for delta in generation:
                    self._terminal.write(delta.text)
                return generation.result
        finally:
            self._generation = None
            self._is_stopping = False


@contextmanager
def _handling(number: int, handler: Callable[..., object]) -> Iterator[None]:
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)


@contextmanager
def _waking() -> Iterator[None]:
    """
    Interrupt what the main thread waits for, now and then.

    Python's readline looks for signals only when one interrupts its wait. A Ctrl-C just
    before the wait would go unseen until a key is pressed.
    """
    if sys.platform == "win32":
        yield
        return
    with _handling(signal.SIGALRM, lambda *_: None):
        signal.setitimer(signal.ITIMER_REAL, WAKE_S, WAKE_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _summary(result: Result, params: SamplingParams) -> str:
    """One line: what was cached, how fast it was, and what cut it."""
    usage, timings = result.usage, result.timings
    parts = [f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"]
    if timings.ttft_s is not None:
        parts.append(f"first token after {timings.ttft_s:.2f} s")
    rate = f" at {1 / timings.tpot_s:.1f} tokens/s" if timings.tpot_s else ""
    parts.append(f"{usage.completion_tokens} tokens{rate}")
    if result.finish_reason is FinishReason.CANCELLED:
        parts.append("stopped")
    elif result.finish_reason is FinishReason.LENGTH:
        is_own_limit = usage.completion_tokens == params.max_tokens
        parts.append("cut by --max-tokens" if is_own_limit else "the context is full")
    return f"[{', '.join(parts)}]"
