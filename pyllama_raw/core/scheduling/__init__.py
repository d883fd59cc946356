"""
Scheduling: what a step computes, and what becomes of its result.

Read `scheduler` first, which is the interface. `roster` has the requests that have not
ended. `packer` chooses what a step computes, by turns of `lots`. `results` takes in
what came of it; `suspects` are sequences that took part in a failure. `texts` and
`source_steps` have steps of their own. `admission` says whether a request may wait.
"""
