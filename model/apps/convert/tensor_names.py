"""Names of tensors that many families share (families.py): for each of our modules, theirs with a layout."""

from __future__ import annotations

from .tensor_layout import Experts, GateUp, Layout, Qkv


def same(name: str) -> Layout:
    """The same tensor under another name."""
    return Layout((name,))


WHOLE: dict[str, Layout] = {
    "embedding.word_embeddings": same("model.embed_tokens"),
    "decoder.final_layernorm": same("model.norm"),
    "output_layer": same("lm_head"),
}
NORMS: dict[str, Layout] = {
    "input_layernorm": same("input_layernorm"),
    "pre_mlp_layernorm": same("post_attention_layernorm"),
}
ATTENTION: dict[str, Layout] = {
    "self_attention.linear_qkv": Qkv(tuple(f"self_attn.{n}_proj" for n in "qkv")),
    "self_attention.linear_proj": same("self_attn.o_proj"),
}
QK_NORMS: dict[str, Layout] = {f"self_attention.{n}_layernorm": same(f"self_attn.{n}_norm") for n in "qk"}
LATENT: dict[str, Layout] = {
    "self_attention.linear_q_proj": same("self_attn.q_proj"),
    "self_attention.linear_q_down_proj": same("self_attn.q_a_proj"),
    "self_attention.q_layernorm": same("self_attn.q_a_layernorm"),
    "self_attention.linear_q_up_proj": same("self_attn.q_b_proj"),
    "self_attention.linear_kv_down_proj": same("self_attn.kv_a_proj_with_mqa"),
    "self_attention.kv_layernorm": same("self_attn.kv_a_layernorm"),
    "self_attention.linear_kv_up_proj": same("self_attn.kv_b_proj"),
    "self_attention.linear_proj": same("self_attn.o_proj"),
}
MLP: dict[str, Layout] = {
    "mlp.linear_fc1": GateUp(("mlp.gate_proj", "mlp.up_proj")),
    "mlp.linear_fc2": same("mlp.down_proj"),
}
EXPERTS: dict[str, Layout] = {
    "mlp.router": same("mlp.gate"),
    "mlp.experts.linear_fc1": Experts(("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj")),
    "mlp.experts.linear_fc2": Experts(("mlp.experts.{e}.down_proj",)),
}
SHARED: dict[str, Layout] = {
    "mlp.router.expert_bias": same("mlp.gate.e_score_correction_bias"),
    "mlp.shared_experts.linear_fc1": GateUp(("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")),
    "mlp.shared_experts.linear_fc2": same("mlp.shared_experts.down_proj"),
}
DENSE: dict[str, Layout] = {**NORMS, **ATTENTION, **MLP}
PLAIN_MLP: dict[str, Layout] = {"mlp.linear_fc1": same("mlp.up_proj"), "mlp.linear_fc2": same("mlp.down_proj")}
