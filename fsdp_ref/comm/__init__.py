"""How do bytes get from rank to rank: groups, collectives, streams and communication hooks."""
