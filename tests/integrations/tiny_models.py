"""Small random models of the families that have memories of rows, as transformers has them."""

from __future__ import annotations

from typing import Any

import torch

SIZES = {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
GEMMA = SIZES | {
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 96,
    "sliding_window": 32,
    "num_kv_shared_layers": 0,
}
TABLES = {
    "qwen": "*.ngram_embedding",  # of 16 shards on file
    "gemma4": "*.embed_tokens_per_layer",
    "gemma3n": "*.embed_tokens_per_layer",
}


def tiny(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model of random weights, in evaluation mode."""
    torch.manual_seed(0)
    return _MAKERS[family]().to(dtype).eval()


def _qwen() -> Any:
    from transformers import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    linear = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    experts = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    experts |= {"num_experts": 4, "num_experts_per_tok": 2}
    memory = {"ple_layer_ids": [2], "ple_embed_dim": 64, "ngram_vocab_size_base": 200, "split_ngram_parts": 16}
    index = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 64}
    others = {"hc_count": 2, "hc_lowrank": 8, "indexer_compress_ratio": 4, "num_hidden_layers": 4}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    return Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**SIZES, **linear, **experts, **memory, **index, **others, **tokens))


def _gemma4() -> Any:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    return Gemma4ForCausalLM(Gemma4TextConfig(**GEMMA, num_hidden_layers=6, global_head_dim=32))


def _gemma3n() -> Any:
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    return Gemma3nForCausalLM(Gemma3nTextConfig(**GEMMA, num_hidden_layers=5, laurel_rank=8))


_MAKERS = {"qwen": _qwen, "gemma4": _gemma4, "gemma3n": _gemma3n}
