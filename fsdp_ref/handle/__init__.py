"""One flat parameter: how it is built, gathered, freed, shown to users, and what happens to its gradient."""
