"""Worlds of ranks on demand: the pool, the ledger of their collectives, the record of their streams."""
