"""What did each rank do, in which order? Collectives from the ledger, unit transitions from the implementation.

- `recorder`: collects the events of one rank.
- `modules`: forward and backward of named modules, seen from outside.
- `job`: runs one case on a rank while recording.
- `run`: asks a world for the history of a case.
"""
