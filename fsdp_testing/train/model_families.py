"""The smallest model of each family of causal language models that Transformers has. Nothing is downloaded.

One rule makes a configuration tiny, whatever its family: of the sizes below it takes those that the family's default
configuration has. Families with sizes of their own have a line in `_OWN_SIZES`.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from torch import nn

from fsdp_testing.errors import InvalidArgument

MODELS = tuple(
    re.findall(
        r"[\w-]+",
        """
    apertus arcee bitnet bloom codegen cohere cohere2 cohere2_moe ctrl deepseek_v2 deepseek_v3 diffllama ernie4_5 exaone4
    falcon falcon_mamba flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj
    granite granitemoe helium jamba lfm2 llama llama4_text mamba minimax mistral mixtral modernbert-decoder mpt nemotron olmo
    olmo2 olmo3 olmoe opt persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe recurrent_gemma rwkv seed_oss smollm3 stablelm
    starcoder2 xglm
    """,
    )
)
"""Families that are tried by default: decoders of text that load from such a configuration."""

VOCABULARY = 64
SPECIAL = 3
"""Tokens below are padding, beginning and end, which some families treat in their own way."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": VOCABULARY,
    "sliding_window": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "dff": 48,
    "rotary_dim": 4,
    "use_cache": False,
}
_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Heads whose parts with and without rotary embedding have sizes of their own keep all heads.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT | {"head_dim": 8, "num_experts_per_tok": 2},
    "deepseek_v3": _LATENT | {"head_dim": 8},
    "falcon": {"head_dim": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
}
"""None: not to be given, since it follows from others."""


def tiny(family: str) -> Any:
    """Return the tiny configuration of a family, such as "llama": no dropout, no router's loss.

    Raises:
        InvalidArgument: The installed Transformers has no such family, or the family takes no such sizes.
    """
    known = transformers("CONFIG_MAPPING")
    if family not in transformers("models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InvalidArgument(
            f"model: expected a family of causal language models of the installed Transformers, got {family!r}. Give its "
            "model_type, or an importable function that makes a model."
        )
    try:
        default = known[family]()
        present = {name for name in _SIZES if getattr(default, name, None) is not None}
        given = {name: _SIZES[name] for name in present} | {n: v for n, v in _TOKENS.items() if hasattr(default, n)}
        given |= {name: 0.0 for name, v in default.to_dict().items() if "drop" in name and isinstance(v, float)}
        given |= _OWN_SIZES.get(family, {})
        return known[family](**{name: value for name, value in given.items() if value is not None})
    except Exception as error:
        raise InvalidArgument(
            f"model {family!r}: expected a configuration that takes tiny sizes, got {type(error).__name__}: {error}. Give an "
            "importable function that makes the model."
        ) from error


def make_tiny(family: str) -> nn.Module:
    """Return a model of the tiny configuration, with random weights from torch's generator."""
    model = transformers("AutoModelForCausalLM").from_config(tiny(family))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def transformers(name: str) -> Any:
    """Return what Transformers has under a name; it is imported when it is first asked for."""
    package: Any = importlib.import_module("transformers")
    package.logging.set_verbosity_error()
    return importlib.import_module(f"transformers.{name}") if "." in name else getattr(package, name)
