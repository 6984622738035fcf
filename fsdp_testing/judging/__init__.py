"""How is a case judged? Observations of ranks and the oracle's expectation in, a verdict out."""
