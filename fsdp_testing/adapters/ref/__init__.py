"""How is the reference judged? As one implementation among others: the wrapper and the composable way to it."""
