"""The public entry points: thin, over one code path."""
