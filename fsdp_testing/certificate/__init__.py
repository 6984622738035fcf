"""Does an implementation hold in every small case? All of them are run, up to symmetry, and judged as any case is."""
