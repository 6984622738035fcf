"""Communication between ranks: groups, collectives, streams and communication hooks."""
