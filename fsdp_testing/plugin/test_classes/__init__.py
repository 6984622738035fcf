"""Runs test classes that start processes of their own on ranks of the pool, unchanged.

- `processes`: N processes for one class, what they did, and the verdict on all of them.
- `in_rank`: what each of these processes calls.
- `torch_classes`: torch's base classes (`MultiProcessTestCase` and `MultiProcContinuousTest`, and so `FSDPTest`,
  `DTensorTestBase` and the rest).
- `deepspeed_classes`: classes in the style of DeepSpeed's `DistributedTest`.

Only the launch of processes is replaced. What the classes do before and after it, and in which process, is unchanged.
"""
