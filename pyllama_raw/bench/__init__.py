"""
Load for engines and servers, and what is made of their times.

    workloads, trace_files  ->  calls
    drive                       sends calls to a target, closed or open loop
    engine_target, http_target  the targets; http_client is what the latter speaks by
    figures, result             numbers of one run
    rounds                      several targets, interleaved
    table, plots, page, compare what is made of results

`pyllama-raw bench` is its command; benchmarks/README.md explains the numbers.
"""
