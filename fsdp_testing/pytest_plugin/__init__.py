"""The pytest plugin: tests marked `world` run on N ranks and give one result. The only package that imports pytest."""
