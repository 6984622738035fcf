"""What `with_relations.py` imports beside it; another version has another rate."""

RATE = 0.1
