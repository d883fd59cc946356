"""Readers of bytes from outside, as scripts/fuzz.py tries them."""

from scripts.fuzz_targets import constraints, files, http, prompts, services

TARGETS = {
    target.name: target
    for module in (http, constraints, prompts, files, services)
    for target in module.TARGETS
}
