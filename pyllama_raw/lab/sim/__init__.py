"""
Simulation: the scheduler that serves, on a machine that is a formula.

    result = simulate(Workload(n_requests=10_000), Machine(policy="sjf"))

Requests, budgets, cells, prefixes and policies are real; only the seconds of a step come
from a cost model, and time is a number. A result depends on nothing but the arguments.
"""

from pyllama_raw.lab.sim.run import (
    CostModel,
    Figures,
    Fit,
    Machine,
    fit,
    simulate,
    table,
    until_next,
)
from pyllama_raw.lab.sim.workload import Guessed, Lengths, Trace, Workload
from pyllama_raw.routing import RouterName

__all__ = [
    "CostModel",
    "Figures",
    "Fit",
    "Guessed",
    "Lengths",
    "Machine",
    "RouterName",
    "Trace",
    "Workload",
    "fit",
    "simulate",
    "table",
    "until_next",
]
