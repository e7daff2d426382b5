"""The keys of a Hugging Face `config.json` that change the computation of a decoder, and those that do not.

A config with a value for a refused key describes another model than the one priced. Keys that are in no list
here may also do so, and the user is told.
"""

from collections.abc import Mapping
from typing import Any

from simcore.input.files import shown
from simcore.models.errors import ModelError
from simcore.models.mixers import FULL, LINEAR, SLIDING

EXPERTS, SPARSE, STATE = "mixtures of experts", "sparse attention", "layers that keep a state"
REFUSED: Mapping[str, str] = {
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "moe_intermediate_size": EXPERTS,
    "kv_lora_rank": "latent attention",
    "q_lora_rank": "latent attention",
    "dual_chunk_attention_config": "dual-chunk attention",
    "attention_chunk_size": "chunked attention",
    "sparse_attention_config": SPARSE,
    "sparse_config": SPARSE,
    "nsa_config": SPARSE,
    "index_topk": SPARSE,
    "blocksparse_block_size": SPARSE,
    "mamba_d_state": STATE,
    "mamba_expand": STATE,
    "ssm_state_size": STATE,
    "state_size": STATE,
    "linear_num_key_heads": STATE,
    "linear_attn_config": STATE,
    "full_attention_interval": STATE,
    "hybrid_override_pattern": STATE,
    "layers_block_type": STATE,
    "attn_type_list": STATE,
    "block_configs": "layers of different widths",
    "cross_attention_layers": "cross-attention",
    "num_kv_shared_layers": "KV caches shared between layers",
    "cla_share_factor": "KV caches shared between layers",
    "num_hidden_layers_per_encoder": "an encoder beside the decoder",
    "is_encoder_decoder": "an encoder beside the decoder",
    "sliding_window_pattern": "windowed attention",
    "attn_logit_softcapping": "capped attention scores",
    "use_qk_norm": "a norm of q and k that this model_type has not",
    "qk_layernorm": "a norm of q and k that this model_type has not",
    "quantization": "MLX's quantized weights",
}
# Layers that predict further tokens per step: used only by speculative decoding, else left out.
EXTRA_TOKEN_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# Keys that are read elsewhere or do not change the computation: names, special tokens, training, constants.
_PLAIN = """
    _name_or_path _source _attn_implementation _attn_implementation_autoset activation_function
    add_cross_attention architectures attention_bias attention_dropout attention_multiplier attn_pdrop
    auto_map bad_words_ids bos_token_id chunk_size_feed_forward compression_config decoder_start_token_id
    dtype embd_pdrop embedding_multiplier eos_token_id finetuning_task gradient_checkpointing head_dim
    hidden_act hidden_activation hidden_size id2label ignore_index image_token_id image_token_index
    initializer_range intermediate_size is_decoder label2id layer_norm_epsilon layer_norm_eps layer_types
    logits_scaling max_length max_position_embeddings max_seq_len max_sequence_length max_seq_length
    max_window_layers mlp_bias model_max_length model_type mrope_section multi_modal_projector_bias
    multimodal_projector_bias n_ctx n_embd n_head n_inner n_layer n_positions no_rope_layer_interval
    no_rope_layers num_attention_heads num_hidden_layers num_key_value_heads
    original_max_position_embeddings output_attentions output_hidden_states pad_token_id
    partial_rotary_factor prefix pretraining_tp projector_hidden_act quantization_config
    reorder_and_upcast_attn resid_pdrop residual_multiplier return_dict rms_norm_eps rope_parameters
    rope_scaling rope_theta rotary rotary_dim rotary_pct scale_attn_by_inverse_layer_idx scale_attn_weights
    sep_token_id seq_len seq_length sliding_window spatial_merge_size split_logits_loss summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params
    text_config tie_word_embeddings tokenizer_class torch_dtype torchscript transformers_version
    unsloth_fixed unsloth_version use_cache use_mrope use_sliding_window video_token_id vision_config
    vision_end_token_id vision_feature_layer vision_feature_select_strategy vision_start_token_id
    vision_token_id vocab_size
"""
PLAIN = frozenset(_PLAIN.split())
# Keys of a quantization_config of method fp8: those that are read, and those that change no product.
OF_FP8 = frozenset({
    "quant_method", "activation_scheme", "fmt", "weight_block_size", "modules_to_not_convert",
    "ignored_layers", "scale_fmt", "kv_cache_scheme", "kv_cache_quant_algo", "producer",
})  # fmt: skip


def check_keys(name: str, config: Mapping[str, Any]) -> None:
    """Raises ModelError if a refused key has a value."""
    for key, what in REFUSED.items():
        if config.get(key):
            raise ModelError(f"{name}: {key} is set, but {what} cannot be modelled yet")


def key_notes(config: Mapping[str, Any]) -> list[str]:
    """Notes for the user on ignored keys."""
    notes = [
        f"{key} {config[key]}: layers that guess further tokens are left out, as in plain decoding"
        for key in EXTRA_TOKEN_LAYERS
        if config.get(key)
    ]
    passed = {*PLAIN, *EXTRA_TOKEN_LAYERS, *REFUSED}
    unknown = sorted(key for key, value in config.items() if key not in passed and value not in (None, False))
    if unknown:
        notes.append(f"not known, and priced as if they were not there: {', '.join(unknown)}")
    quantized = config.get("quantization_config")
    given = quantized if isinstance(quantized, dict) and quantized.get("quant_method") == "fp8" else {}
    set_ = {str(key) for key, value in given.items() if value not in (None, False)}
    if other := sorted(set_ - OF_FP8):
        names = ", ".join(f"quantization_config.{key}" for key in other)
        notes.append(f"not known, and priced as if they were not there: {names}")
    if config.get("no_rope_layers"):
        notes.append("no_rope_layers: rotary embedding is priced in all layers")
    return notes


def check_attention(
    name: str, config: Mapping[str, Any], layers: int, longest: int | None
) -> tuple[str, ...]:
    """The mixers of a hybrid's layers; empty if all attend over the whole context of up to `longest` tokens.
    Raises ModelError for windows of layers that no layer_types names, and for other kinds of layers."""
    window = window_of(name, config, layers)
    types = config.get("layer_types")
    windowed = window is not None and (longest is None or window < longest)
    if types is None:
        if windowed:
            raise ModelError(
                f"{name}: sliding_window is set to {window}, but windowed attention cannot be modelled yet"
            )
        return ()
    if not isinstance(types, list) or len(types) != layers:
        raise ModelError(f"{name}: layer_types must have one of the {layers} layers each")
    for kind in types:
        if kind not in (FULL, SLIDING, LINEAR):
            allowed = ", ".join((FULL, SLIDING, LINEAR))
            raise ModelError(f"{name}: layer_types has {shown(kind)} (allowed: {allowed})")
    if SLIDING in types and window is None:
        raise ModelError(f"{name}: layer_types has {SLIDING!r}, and sliding_window names no window")
    # A window as long as the longest context leaves nothing out.
    mixers = tuple(FULL if kind == SLIDING and not windowed else str(kind) for kind in types)
    return mixers if {*mixers} != {FULL} else ()


def window_of(name: str, config: Mapping[str, Any], layers: int) -> int | None:
    """The attention window that some layer has, or None. Qwen configs name a window even if it is off, and
    only layers from `max_window_layers` on have it."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return None
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ModelError(
            f"{name}: sliding_window is {shown(window)}; a whole number from 1, or null, is needed"
        )
    qwen = str(config.get("model_type", "")).startswith("qwen")
    if qwen and "use_sliding_window" not in config:
        return None
    full = config.get("max_window_layers")
    if qwen and isinstance(full, int) and full >= layers:
        return None
    return window
