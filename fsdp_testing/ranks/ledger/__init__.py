"""Records which collectives every rank issues, in shared memory, and compares the ranks while they run.

- `memory`: the shared-memory layout, one writer per rank, any reader.
- `fence`: makes one of two simultaneous ranks see the other, on every processor.
- `recorder`: what a rank does at each collective: record, compare with the peers, refuse a mismatch.
- `interception`: how the recorder sees every collective of torch, whichever way it was called.
- `readers`: what a call means, one table for each way to call.
- `late_delivery`: asynchronous collectives whose results arrive when they are waited for, so that a missing wait shows.
- `reading`: how the controller reads the memory of a rank that no longer answers.
"""
