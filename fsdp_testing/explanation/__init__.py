"""How does a failure become something to understand? The shortest schedule that shows it, and a sentence about it.

- `budget`: how many programs may be run for it, and for how long.
- `shortest`: leaves operations out while the failure looks the same.
- `likeness`: what one process would have to do to give these wrong numbers.
- `holding`: which units still held gathered parameters when the optimizer stepped.
- `telling`: the sentence.
- `run`: all failures of a run, one explanation for each root cause.
"""
