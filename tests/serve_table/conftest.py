"""Hypothesis without a clock or a memory: a run finds what the last one found."""

from hypothesis import settings

settings.register_profile("rutter", deadline=None, derandomize=True)
settings.load_profile("rutter")
