"""Does an implementation hold in every small case? All of them are run, and judged as any case is."""
