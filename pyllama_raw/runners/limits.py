"""Limits."""


class Limits: ...
