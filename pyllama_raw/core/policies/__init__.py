"""
Scheduling policies: the next of the requests that wait, the prompts that go on, the victims.

A policy answers with numbers. The core keeps budgets, memory, ties and the bound of waits.
"""
