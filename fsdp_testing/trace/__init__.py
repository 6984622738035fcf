"""What did each rank do, in which order? Collectives from the ledger, unit transitions from the implementation.

- `recorder`: collects the events of one rank.
- `modules`: forward and backward of named modules, seen from outside.
- `waits`: how long the rank waits for its collectives.
- `job`: runs one case on a rank while recording.
- `run`: asks a world for the history of a case.
- `parity`: the order of two implementations.
- `portrait`: a history as stretches of time, held bytes and shards, ready to be drawn.
"""
