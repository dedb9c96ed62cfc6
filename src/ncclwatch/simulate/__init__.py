"""A simulated training job: parallel layout, schedules, faults, and the records the collectors would have made of it.

Everything here is **simulation** and says so: host names begin with ``sim-node-``, the library path is ``(simulated libnccl)``,
and every table that is printed from it carries the word. It lives in the package and not among the tests for three reasons: the
layout and schedule arithmetic is the same that names stages in a real job; a user can replay "what would ncclwatch say if this
link went down" on the layout of their own job without a cluster; and it is held to the package's typing and documentation.
Expectations (what a verdict should say) are part of the scenario file but never of the records: see
:mod:`ncclwatch.simulate.records`.

An import never points from here into the engine, nor from the engine into here.
"""
