"""Cases as values: operations, models, drawing and normal form, and the records that every room speaks in."""
