"""Every small case: all of them are run, and judged as any case is."""
