"""Explains a failure: the shortest schedule that shows it, and a sentence about it.

- `shrinking`: leaves parts out while the failure looks the same, within a budget of runs or seconds.
- `hypotheses`: what one process would have to do to give these wrong numbers; `casts`: the same for other dtypes.
- `rendering`: the sentence.
- `root_causes`: all failures of a run, one explanation for each root cause.
"""
