"""
Load for engines and servers, and what is made of their times.

`pyllama-raw bench` is its command; docs/measuring.md explains the numbers.
"""
