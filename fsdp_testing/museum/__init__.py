"""Which real bugs of the field would the harness catch? Each is planted in the reference, one at a time.

- `exhibit`: what an exhibit is.
- `planting`: how a bug is planted in a running reference and taken out again.
- `halls/`: the exhibits, one file per part of the reference that they break.
- `collection`: all exhibits by id, and each as an implementation that the harness can judge.
- `tour`: runs the checks that must catch each exhibit, and the fuzzer if asked.
"""
