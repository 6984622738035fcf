"""The storage of parameters and gradients: sites on modules, flat buffers, views, precision, offloading.

Knows tensors and modules, but no ranks.
"""
