"""Every pair of traits: legal cases that hold each pair there is, and what became of it."""
