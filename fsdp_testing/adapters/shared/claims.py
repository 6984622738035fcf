"""The documented minimum that implementations of one kind claim; an adapter adds its own to it."""

from __future__ import annotations

EVERYWHERE = frozenset(
    {
        "nested_wrapping",  # without sharding units mean nothing, and naming some changes nothing
        "no_sync",
        "accumulate_without_no_sync",
        "forward_only",
        "inference_mode",
        "late_optimizer",
        "shared_parameters",
        "reused_modules",
        "frozen_parameters",
        "unused_parameters",
        "uneven_parameters",
        "buffers",
        "container_outputs",
        "uneven_batches",
        "clip_grad_norm",
        "loss_scaling",
        "compiled",
        "optimizer_pieces",
        "full_state_dict",
        "module_versions",
        "extra_state",
        "optim_state",
        "sub_groups",
        "activation_checkpointing",
        "early_hooks",
        "outdated_backward",
        "backward_inputs",
        "input_gradients",
        "strict_state",
        "reordered_optimizer",
        "user_entries",
        "several_models",
    }
)
"""Claims of all of torch's implementations."""

REPLICATED = EVERYWHERE | {
    "no_shard",
    "data_assignment",
    "gradient_edits",
    "in_place_edits",
    "shared_across_units",
    "frozen_mixed_unit",
    "unused_parameters_differ",
    "unused_gradient_is_none",
    "zero_dim_parameters",
    "empty_parameters",
    "strided_parameters",
    "mixed_dtype_units",
    "integer_parameters",
    "loss_bypasses_output",
    "parameter_outputs",
    "hidden_recomputation",
    "inplace_on_output",
    "forward_edits",
    "error_if_nonfinite",
    "tensor_hooks",
    "summon_writeback",
    "whole_parameter_steps",
}
"""Claims that follow from full replication."""

SHARDED = EVERYWHERE | {
    "full_shard",
    "shard_grad_op",
    "hybrid",
    "ignored_parameters",
    "mixed_precision",
    "reduce_dtype",
    "sharded_state_dict",
    "reentrant_checkpointing",
    "dtype_cast",
    "prefetch",
    "unit_trace",
    "units_after_forward",
    "streams",
}
"""Claims of both FSDP1 and FSDP2."""
