"""Records what each rank did, in order: collectives from the ledger, unit transitions from the implementation.

- `recorder`: collects the events of one rank; watches forward and backward of named modules, and waits for collectives.
- `run`: runs a case on ranks while recording, and gives back its history.
- `order_parity`: the order of two implementations.
- `portrait`: a history as stretches of time, held bytes and shards, ready to be drawn.
"""
