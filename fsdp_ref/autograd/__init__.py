"""The interface of units to the autograd graph: its references to units, its hooks, and the parameters that it saves."""
