"""How does a failure become something to understand? The shortest schedule that shows it, and a sentence about it.

- `budget`: how many programs may be run for it, and for how long.
- `shortest`: leaves operations out while the failure looks the same.
- `hypotheses`: what one process would have to do to give these wrong numbers; `casts`: the same for other dtypes.
- `rendering`: the sentence.
- `root_causes`: all failures of a run, one explanation for each root cause.
"""
