"""The judgement whether a training script, a function or a model computes on N ranks what it computes in one process.

Three ways to start, each a module: `script` (`fsdp-verify train`, `check_script`), `function` (`check_training`) and `model`
(`check_model`, with `model_families`). The rest is shared.

- `running`, `on_rank`, `script_job`, `surroundings`: how a world, and a rank in it, runs a training.
- `observation`, `steps`, `reading`, `holdings`, `spans`, `deepspeed_engine`, `generators`, `terms`, `evidence`: what a rank
  holds and computes at each step, what backward adds to gradients, and what explains a difference.
- `batches`, `loaders`, `collators`, `feed`, `rows`: the data that ranks took, how they share it, how one process gets it.
- `conventions`: conventions of a script by which N ranks intentionally differ from one process.
- `control`, `idle`: what is wrong within a single run, and what has no effect in it. Pure.
- `quantities`, `whole`, `parts`: what a world computed, by name, put together from its ranks. Pure.
- `comparison`, `disturbance`, `comparable`, `readings`: where two runs differ beyond rounding, and what need not agree.
- `check`, `pair`, `deciding`, `by_batches`, `resuming`: the one judgement of a world beside its reference.
- `causes`: the one table of causes. Pure.
- `report`: the one record of a verdict, as it reads and is written.
"""
