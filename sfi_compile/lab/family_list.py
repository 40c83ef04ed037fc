"""The sample of decoder families. A new entry here appears in `sfi explain --families`. Imports the lab.

Sizes are those of `families.build`: 2 layers, 4 query heads over 2 KV heads of dimension 16.
"""

from __future__ import annotations

from typing import Any

from sfi_compile.lab import families
from sfi_compile.lab.families import WINDOW, Family, build, own
from sfi_compile.lab.handwritten import LAYERS, MAX_POSITION, LatentBlock, OpaqueBlock, OwnBlock

_Settings = dict[str, Any]

_OWN_SIZES: _Settings = dict.fromkeys(("num_key_value_heads", "num_attention_heads", "hidden_size"), ...)
"""For a configuration that has names of its own for these."""
_MHA: _Settings = {"num_key_value_heads": ...}
_MOE: _Settings = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT2: _Settings = {
    "n_embd": 64,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": MAX_POSITION,
    "num_key_value_heads": ...,
}
_GPTJ: _Settings = {**_GPT2, "rotary_dim": 8}
_FALCON: _Settings = {"new_decoder_architecture": False, "multi_query": False, "alibi": False, **_MHA}
_MLA: _Settings = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                   "v_head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": LAYERS, "n_group": 1,
                   "topk_group": 1}  # fmt: skip
_GEMMA: _Settings = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
_T5: _Settings = {**_OWN_SIZES, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": LAYERS, "num_heads": 4,
       "num_hidden_layers": ...}  # fmt: skip
_BART: _Settings = {f"{half}_{what}": n for half in ("encoder", "decoder") for what, n in
         (("layers", LAYERS), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
_BART |= {**_OWN_SIZES, "d_model": 64, "num_hidden_layers": ...}
_SSM: _Settings = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_HALF_WINDOW: _Settings = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR_FIRST: _Settings = {"layer_types": ["linear_attention", "full_attention"]}

_CROSS: _Settings = {"cache": families.encoder_decoder_cache, "call": families.call_encoder_decoder}
_MASKED: _Settings = {"call": families.call_masked}
_OWN: _Settings = {"cache": families.own_cache, "call": families.call_with_positions}
_OWN_NUMBER: _Settings = {"cache": families.own_cache, "call": families.call_with_number}

_GROUPED = (
    Family("llama", build("Llama")),
    Family("qwen2", build("Qwen2")),
    Family("qwen3", build("Qwen3", head_dim=16)),
    Family("qwen2-moe", build("Qwen2Moe", shared_expert_intermediate_size=32, **_MOE)),
    Family("qwen3-moe", build("Qwen3Moe", head_dim=16, **_MOE)),
    Family("mistral", build("Mistral", sliding_window=None)),
    Family("mixtral", build("Mixtral", **_MOE)),
    Family("phi", build("Phi")),
    Family("phi3", build("Phi3", sliding_window=None)),
    Family("phimoe", build("Phimoe", sliding_window=None, num_local_experts=4)),
    Family("smollm3", build("SmolLM3")),
    Family("starcoder2", build("Starcoder2", sliding_window=None)),
    Family("olmo", build("Olmo")),
    Family("olmo2", build("Olmo2")),
    Family("olmoe", build("Olmoe", **_MOE)),
    Family("granite", build("Granite", attention_multiplier=0.1)),
    Family("granite-moe", build("GraniteMoe", attention_multiplier=0.1, **_MOE)),
    Family("cohere", build("Cohere", logit_scale=1.0)),
    Family("gemma", build("Gemma", head_dim=16)),
    Family("stablelm", build("StableLm")),
    Family("glm", build("Glm", head_dim=16)),
    Family("glm4", build("Glm4", head_dim=16)),
    Family("glm4-moe", build("Glm4Moe", head_dim=16, n_routed_experts=4, first_k_dense_replace=1, **_MOE)),
    Family("nemotron", build("Nemotron")),
    Family("ernie4.5", build("Ernie4_5", head_dim=16)),
    Family("hunyuan", build("HunYuanDenseV1", head_dim=16)),
    Family("arcee", build("Arcee")),
    Family("helium", build("Helium", head_dim=16)),
    Family("seed-oss", build("SeedOss", head_dim=16)),
    Family("apertus", build("Apertus")),
    Family("bitnet", build("BitNet")),
    Family("dots1", build("Dots1", head_dim=16, sliding_window=None, first_k_dense_replace=1, n_routed_experts=4,
                          n_shared_experts=1, n_group=1, topk_group=1, **_MOE)),
)  # fmt: skip
"""Grouped-query attention through sdpa on a preallocated cache."""

_UNGROUPED = (
    Family("gpt2", build("GPT2", "LMHeadModel", **_GPT2)),
    Family("gpt-neox", build("GPTNeoX", **_MHA)),
    Family("gptj", build("GPTJ", **_GPTJ)),
    Family("codegen", build("CodeGen", **_GPTJ)),
    Family("persimmon", build("Persimmon", **_MHA)),
    Family("gpt-bigcode", build("GPTBigCode", multi_query=True, **_GPT2)),
    Family("falcon-mqa", build("Falcon", **_FALCON | {"multi_query": True})),
    Family("falcon-new", build("Falcon", num_kv_heads=2, **_FALCON | {"new_decoder_architecture": True})),
    Family("opt", build("OPT", ffn_dim=64, word_embed_proj_dim=64, **_MHA), **_MASKED),
    Family("biogpt", build("BioGpt", **_MHA), **_MASKED),
)
"""One KV head for every query head, or for all."""

_WINDOWED = (
    Family("mistral-window", build("Mistral", sliding_window=WINDOW)),
    Family("qwen2-window", build("Qwen2", use_sliding_window=True, **_HALF_WINDOW)),
    Family("olmo3", build("Olmo3", **_HALF_WINDOW)),
    Family("cohere2", build("Cohere2", head_dim=16, logit_scale=1.0, **_HALF_WINDOW)),
    Family("gemma3", build("Gemma3Text", ".Gemma3ForCausalLM", **_GEMMA | _HALF_WINDOW)),
    Family("exaone4", build("Exaone4", head_dim=16, **_HALF_WINDOW)),
    Family("llama4", build("Llama4Text", ".Llama4ForCausalLM", head_dim=16, intermediate_size_mlp=64,
                           attention_chunk_size=WINDOW, no_rope_layers=[1, 0], interleave_moe_layer_step=2,
                           num_local_experts=2, num_experts_per_tok=1)),
)  # fmt: skip
"""Windows of `WINDOW` tokens in all layers or in the first."""

_BY_HAND = (
    Family("llama-eager", build("Llama", implementation="eager")),
    Family("gptj-eager", build("GPTJ", implementation="eager", **_GPTJ)),
    Family("gpt-neo", build("GPTNeo", implementation="eager", num_layers=LAYERS, num_heads=4,
                            attention_types=[[["global"], LAYERS]], num_hidden_layers=..., **_OWN_SIZES
                            | {"hidden_size": 64})),
    Family("xglm", build("XGLM", implementation="eager", d_model=64, ffn_dim=64, num_layers=LAYERS, attention_heads=4,
                         num_hidden_layers=..., **_OWN_SIZES), **_MASKED),
    Family("gemma2", build("Gemma2", implementation="eager", **_GEMMA)),
    Family("vaultgemma", build("VaultGemma", implementation="eager", **_GEMMA)),
    Family("gpt-oss", build("GptOss", implementation="eager", head_dim=16, **_HALF_WINDOW, **_MOE)),
    Family("bloom", build("Bloom", implementation="eager", n_head=4, n_layer=LAYERS, num_hidden_layers=...,
                          **_OWN_SIZES | {"hidden_size": 64}), **_MASKED),
    Family("mpt", build("Mpt", implementation="eager", d_model=64, n_heads=4, n_layers=LAYERS, max_seq_len=MAX_POSITION,
                        num_hidden_layers=..., **_OWN_SIZES)),
    Family("falcon-alibi", build("Falcon", **_FALCON | {"alibi": True}), **_MASKED),
    Family("diffllama", build("DiffLlama")),
    Family("deepseek-v2", build("DeepseekV2", **_MLA)),
    Family("deepseek-v3", build("DeepseekV3", **_MLA)),
)  # fmt: skip
"""Softmaxes by hand, softcaps, sinks, ALiBi, differences of attentions, latent keys."""

_HYBRID = (
    Family("jamba", build("Jamba", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
                          expert_layer_offset=1, use_mamba_kernels=False, mamba_d_state=4, mamba_dt_rank=4, **_MOE)),
    Family("qwen3-next", build("Qwen3Next", head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
                               linear_key_head_dim=16, linear_value_head_dim=16, shared_expert_intermediate_size=32,
                               **_LINEAR_FIRST, **_MOE)),
    Family("minimax", build("MiniMax", head_dim=16, block_size=16, **_LINEAR_FIRST, **_MOE),
           families.minimax_cache, families.call_positioned),
    Family("lfm2", build("Lfm2", layer_types=["conv", "full_attention"], block_ff_dim=64,
                         block_auto_adjust_ff_dim=False)),
    Family("falcon-h1", build("FalconH1", head_dim=16, mamba_d_ssm=64, mamba_d_head=16, **_SSM)),
    Family("granite-moe-hybrid", build("GraniteMoeHybrid", layer_types=["mamba", "attention"], mamba_d_head=32,
                                       attention_multiplier=0.1, shared_intermediate_size=64, **_SSM, **_MOE)),
)  # fmt: skip
"""Attention in some layers, another state in others (FalconH1: both in each)."""

_ENCODER_DECODER = (
    Family("bart", build("Bart", "ForConditionalGeneration", **_BART), **_CROSS),
    Family("mbart", build("MBart", "ForConditionalGeneration", **_BART), **_CROSS),
    Family("pegasus", build("Pegasus", "ForConditionalGeneration", **_BART), **_CROSS),
    Family("marian", build("Marian", "MTModel", decoder_start_token_id=1, **_BART), **_CROSS),
    Family("whisper", build("Whisper", "ForConditionalGeneration", num_mel_bins=8, max_source_positions=12,
                            max_target_positions=MAX_POSITION, **_BART), **_CROSS),
    Family("t5", build("T5", "ForConditionalGeneration", **_T5), **_CROSS),
)  # fmt: skip
"""The decoder's half."""

_HANDWRITTEN = (
    Family("gpt-fast", own(OwnBlock), **_OWN),
    Family("bshd-cache", own(OwnBlock, cache="bshd"), **_OWN),
    Family("scatter-cache", own(OwnBlock, cache="scatter"), **_OWN),
    Family("slice-cache", own(OwnBlock, cache="slice"), **_OWN_NUMBER),
    Family("narrow-cache", own(OwnBlock, cache="narrow"), **_OWN_NUMBER),
    Family("int8-cache", own(OwnBlock, cache="int8"), **_OWN),
    Family("x-transformers", own(OwnBlock, kv_heads=4, attention="einsum"), **_OWN),
    Family("permuted-key", own(OwnBlock, cache="bshd", attention="permuted"), **_OWN),
    Family("grouped-matmul", own(OwnBlock, attention="grouped"), **_OWN),
    Family("alibi", own(OwnBlock, attention="alibi"), **_OWN),
    Family("latent", own(LatentBlock, absorbed=False), **_OWN),
    Family("latent-absorbed", own(LatentBlock, absorbed=True), **_OWN),
    Family("multihead-attention", own(OpaqueBlock), **_OWN),
    Family("nanogpt", families.cacheless(), families.own_cache, families.call_with_history),
    Family("growing-cache", build("Llama"), families.dynamic_cache),
)
"""`lab.handwritten`, and Llama on the cache that transformers makes by default."""

FAMILIES: tuple[Family, ...] = (
    *_GROUPED, *_UNGROUPED, *_WINDOWED, *_BY_HAND, *_HYBRID, *_ENCODER_DECODER, *_HANDWRITTEN,
)  # fmt: skip
"""All of them, each name once."""
