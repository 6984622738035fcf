"""What did each rank do, in which order? Collectives from the ledger, unit transitions from the implementation.

- `recorder`: collects the events of one rank.
- `watching`: forward and backward of named modules, and waits for collectives, seen from outside.
- `job`: runs one case on a rank while recording.
- `run`: asks a world for the history of a case.
- `order_parity`: the order of two implementations.
- `portrait`: a history as stretches of time, held bytes and shards, ready to be drawn.
"""
