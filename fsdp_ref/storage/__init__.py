"""Where do parameters and gradients live: sites on modules, flat buffers, views, precision, offloading.

Knows tensors and modules, and nothing of ranks.
"""
