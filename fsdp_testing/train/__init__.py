"""Does a training script, a function or a model compute on N ranks what it computes in one process?

Three ways to start, each a module: `script` (`fsdp-verify train`, `check_script`), `function` (`check_training`) and `model`
(`check_model`, with `model_families` and `with_accelerate`). What follows is one.

- `running`, `on_rank`, `script_job`, `torchrun`, `surroundings`: how a world, and a rank in it, runs a training.
- `observation`, `reading`, `held`, `spans`, `deepspeed_engine`, `evidence`: what a rank holds and computes at each step, and what
  explains a difference.
- `batches`, `loaders`, `feeding`, `rows`: what data the ranks took, how they share it, how one process is given the same.
- `numbers`, `copies`, `conventions`: what a script logs, which copies of weights it keeps, which conventions it follows.
- `quantities`, `whole`, `parts`: what a world computed, by name, put together from its ranks. Pure.
- `comparison`, `disturbance`, `comparable`, `readings`: where two runs differ beyond roundings, and what need not agree.
- `check`, `pair`, `deciding`, `resuming`: the one judgement of a world beside its reference.
- `causes`, `evidence_causes`, `terms`: the one table of causes. Pure.
- `report`: the one record of a verdict, as it reads and is written.
"""
