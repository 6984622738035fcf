"""The reference as one implementation among others: the wrapper and the composable way to it."""
