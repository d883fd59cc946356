"""
Scheduling policies: who of those that wait is next, whose prompt goes on, who is preempted.

A policy answers with numbers. The core keeps budgets, memory, ties and the bound of waits.
"""
