"""
Simulation: the scheduler that serves, on a machine that is a formula.

    result = simulate(Workload(n_requests=10_000), Machine(policy="sjf"))

Requests, budgets, cells, prefixes and policies are real; only the seconds of a step come
from a cost model, and time is a number. A result depends on nothing but the arguments.
"""

from pyllama_raw.sim.cost import CostModel, Fit, fit, until_next
from pyllama_raw.sim.figures import Figures, table
from pyllama_raw.sim.machine import Machine
from pyllama_raw.sim.router import RouterName
from pyllama_raw.sim.run import simulate
from pyllama_raw.sim.trace import Trace
from pyllama_raw.sim.workload import Lengths, Workload

__all__ = [
    "CostModel",
    "Figures",
    "Fit",
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
