"""Every small case: all of them run, and are judged like any other case."""
