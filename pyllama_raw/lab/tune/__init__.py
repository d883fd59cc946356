"""Finding the fastest options for one model on this machine, by measuring."""

from pyllama_raw.lab.tune.tuning import Tuning, n_measurements, tune
from pyllama_raw.lab.tune.work import Work

__all__ = ["Tuning", "Work", "n_measurements", "tune"]
