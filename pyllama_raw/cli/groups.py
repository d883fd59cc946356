"""Errors of task groups."""

from __future__ import annotations


def first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in *group*, however deep: what a person is told."""
    error = group.exceptions[0]
    return first(error) if isinstance(error, BaseExceptionGroup) else error
